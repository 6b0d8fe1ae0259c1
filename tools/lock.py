"""Write the lock files and the SBOM, or check that they are in step with pyproject.toml.

    python tools/lock.py            asks the package index that pip is configured for; run it where the tests pass
    python tools/lock.py --check    needs no network

`locks/tune.txt` is what `make tune` installs and `locks/test.txt` what `make test` adds; both have what builds the
package. `locks/cpu.txt` has the build of torch for machines without a GPU, which comes first there if the index has it.
`locks/cuda.txt` is what a CUDA build of torch wants besides, and is installed where torch is one. Each package has one
version, the one that is installed here, and the SHA-256 of every wheel of it. No file names an index: the same
wheel has the same hash wherever it comes from.
"""

from __future__ import annotations

import argparse
import hashlib
import html.parser
import importlib.metadata
import io
import json
import re
import subprocess
import sys
import tomllib
import urllib.error
import urllib.parse
import urllib.request
import zipfile
from collections.abc import Iterable
from email.parser import Parser
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name, parse_sdist_filename, parse_wheel_filename
from packaging.version import Version

ROOT = Path(__file__).parents[1]
LOCKS = ("tune", "test", "cuda")
SBOM = ROOT / "locks" / "sbom.cdx.json"
BUILD = ("hatchling", "editables")
LINUX = {"platform_system": "Linux", "sys_platform": "linux", "platform_machine": "x86_64"}
HEADS = {
    "tune": "What `make tune` installs, and what builds the package.",
    "test": "What `make test` installs beside tune.txt.",
    "cuda": "What a CUDA build of torch wants beside tune.txt.",
    "cpu": "The build of torch for machines without a GPU, where the index has it.",
}


class Links(html.parser.HTMLParser):
    """The files on a page of an index: URL and SHA-256, where the page has it, by file name."""

    def __init__(self, base: str) -> None:
        super().__init__()
        self.base, self.files = base, dict[str, tuple[str, str]]()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        reference = dict(attributes).get("href")
        if tag == "a" and reference:
            url = urllib.parse.urlsplit(urllib.parse.urljoin(self.base, reference))
            name = urllib.parse.unquote(Path(url.path).name)
            self.files[name] = url._replace(fragment="").geturl(), url.fragment.removeprefix("sha256=")


class Index:
    """The package index that pip is configured for."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "pip", "config", "list"]
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
        found = {line.split("=", 1)[0].split(".")[-1]: line.split("=", 1)[1].strip("'") for line in lines}
        self.url = found.get("index-url", "https://pypi.org/simple").rstrip("/")
        self.folders = [Path(each) for each in found.get("find-links", "").split() if Path(each).is_dir()]
        self.pages: dict[str, dict[str, tuple[str, str]]] = {}
        self._texts: dict[str, str] = {}  # of metadata, by URL

    def files(self, name: str) -> dict[str, tuple[str, str]]:
        if name not in self.pages:
            page = Links(f"{self.url}/{name}/")
            with urllib.request.urlopen(page.base, timeout=60) as answer:
                page.feed(answer.read().decode())
            self.pages[name] = page.files
        return self.pages[name]

    def hashes(self, name: str, version: str) -> list[str]:
        """Of every wheel of a version; of the sources where there is no wheel."""
        wheels, sources = set(), set()
        for file, (_, digest) in self.files(name).items():
            if (found := _version(file)) is not None and str(found) == version and digest:
                (wheels if file.endswith(".whl") else sources).add(digest)
        return sorted(wheels or sources)

    def builds_for_cpus(self, name: str, version: str) -> list[str]:
        """The hashes of the builds that are called +cpu, which pip's find-links has."""
        found = [path for folder in self.folders for path in folder.glob("*.whl")]
        found = [path for path in found if canonicalize_name(path.name.split("-")[0]) == name]
        wanted = [path for path in found if str(_version(path.name)) == f"{version}+cpu"]
        return sorted(hashlib.sha256(path.read_bytes()).hexdigest() for path in wanted)

    def newest(self, name: str, limit: SpecifierSet) -> str:
        versions = {found for file in self.files(name) if (found := _version(file))}
        return str(max(v for v in versions if not v.is_prerelease and v in limit))

    def requires(self, name: str, version: str) -> list[str]:
        """What the metadata of a wheel asks for; of one for Linux, where they differ."""
        wheels = [f for f in self.files(name) if f.endswith(".whl") and str(_version(f)) == version]
        best = max(wheels, key=lambda file: ("manylinux" in file and "x86_64" in file, "cp312" in file, file))
        url = self.files(name)[best][0]
        if url not in self._texts:
            self._texts[url] = self._metadata(url)
        return Parser().parsestr(self._texts[url]).get_all("Requires-Dist") or []

    def _metadata(self, url: str) -> str:
        try:
            with urllib.request.urlopen(url + ".metadata", timeout=60) as answer:
                return answer.read().decode()
        except urllib.error.HTTPError:  # not every index has it apart from the wheel
            with (
                urllib.request.urlopen(url, timeout=600) as answer,
                zipfile.ZipFile(io.BytesIO(answer.read())) as wheel,
            ):
                name = next(each for each in wheel.namelist() if each.endswith(".dist-info/METADATA"))
                return wheel.read(name).decode()


def _version(file: str) -> Version | None:
    try:
        return parse_wheel_filename(file)[1] if file.endswith(".whl") else parse_sdist_filename(file)[1]
    except ValueError:
        return None


def pinned() -> dict[str, str]:
    """The versions of constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    found = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(each.name): next(iter(each.specifier)).version for each in found}


def roots(*extras: str) -> list[Requirement]:
    """What pyproject.toml asks for, with these extras of our own."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = list(map(Requirement, project["dependencies"]))
    for extra in extras:
        found += map(Requirement, project["optional-dependencies"][extra])
    own = [each for each in found if each.name == project["name"]]
    more = [each for one in own for each in roots(*sorted(one.extras))]
    return [each for each in [*found, *more] if each.name != project["name"]]


def closure(wanted: Iterable[Requirement], index: Index, installed: bool = True) -> dict[str, str]:
    """Versions by name of what is wanted and of all that this requires on Linux.

    Args:
        installed: take versions and requirements from the packages that are installed here, where they are.
    """
    limits = dict[str, SpecifierSet]()  # of what was met so far; a version that breaks one is chosen again
    while True:
        before = dict(limits)
        found = _closure(list(wanted), index, installed, limits)
        if limits == before:
            return found


def _closure(
    queue: list[Requirement], index: Index, installed: bool, limits: dict[str, SpecifierSet]
) -> dict[str, str]:
    found, seen = dict[str, str](), set[tuple[str, str]]()
    while queue:
        requirement = queue.pop()
        name = canonicalize_name(requirement.name)
        limits[name] = limits.get(name, SpecifierSet()) & requirement.specifier
        try:
            package = importlib.metadata.distribution(name) if installed else None
        except importlib.metadata.PackageNotFoundError:
            package = None
        if name not in found:
            version = pinned().get(name) or (Version(package.version).public if package else None)
            found[name] = version or index.newest(name, limits[name])
        asked = package.requires or [] if package else index.requires(name, found[name])
        for extra in ("", *requirement.extras):
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            for each in map(Requirement, asked):
                if (each.marker is None and not extra) or (
                    each.marker and each.marker.evaluate({**LINUX, "extra": extra})
                ):
                    queue.append(each)
    return found


def write() -> None:
    """Ask the index and write everything."""
    index = Index()
    tune = closure([*roots(), *map(Requirement, BUILD)], index)
    test = closure(roots("test"), index)
    wants = [Requirement(each) for each in index.requires("torch", tune["torch"])]
    wants = [each for each in wants if each.marker and each.marker.evaluate({**LINUX, "extra": ""})]
    cuda = closure(wants, index, installed=False)
    parts = {
        "tune": tune,
        "test": {name: version for name, version in test.items() if name not in tune},
        "cuda": {name: version for name, version in cuda.items() if name not in tune},
    }
    for part, packages in parts.items():
        lines = [f"# {HEADS[part]} Written by tools/lock.py."]
        for name, version in sorted(packages.items()):
            lines.append(_entry(name, version, index.hashes(name, version)))
        (ROOT / "locks" / f"{part}.txt").write_text("\n".join(lines) + "\n")
    if hashes := index.builds_for_cpus("torch", tune["torch"]):
        lines = [f"# {HEADS['cpu']} Written by tools/lock.py.", _entry("torch", f"{tune['torch']}+cpu", hashes)]
        (ROOT / "locks" / "cpu.txt").write_text("\n".join(lines) + "\n")
    SBOM.write_text(sbom())


def _entry(name: str, version: str, hashes: list[str]) -> str:
    if not hashes:
        sys.exit(f"the index has no hash of {name} {version}")
    return f"{name}=={version}" + "".join(f" \\\n    --hash=sha256:{digest}" for digest in hashes)


def locked(part: str) -> dict[str, str]:
    """Versions by name of a lock file."""
    text = (ROOT / "locks" / f"{part}.txt").read_text()
    return dict(re.findall(r"^([a-z0-9-]+)==(\S+)", text, re.MULTILINE))


def sbom() -> str:
    """The packages of all lock files as CycloneDX has them; the same for the same lock files."""
    packages = sorted({(name, version, part) for part in LOCKS for name, version in locked(part).items()})
    components = [
        {
            "type": "library", "bom-ref": f"pkg:pypi/{name}@{version}", "name": name, "version": version,
            "purl": f"pkg:pypi/{name}@{version}", "scope": "required" if part == "tune" else "optional",
        }
        for name, version, part in packages
    ]  # fmt: skip
    tree = {
        "bomFormat": "CycloneDX", "specVersion": "1.5", "version": 1,
        "metadata": {"component": {"type": "library", "name": "tilewright", "bom-ref": "tilewright"}},
        "components": components,
    }  # fmt: skip
    return json.dumps(tree, indent=1) + "\n"


def faults() -> list[str]:
    """What is out of step; empty where all is well."""
    found = []
    for part, wanted in (("tune", [*roots(), *map(Requirement, BUILD)]), ("test", roots("test"))):
        has = locked("tune") | (locked("test") if part == "test" else {})
        for each in wanted:
            version = has.get(canonicalize_name(each.name))
            if version is None or version not in each.specifier:
                found.append(f"{each} is not met by locks/{part}.txt, which has {version}")
    everything = locked("tune") | locked("test")
    for name, version in pinned().items():
        if everything.get(name) != version:
            found.append(f"{name} is {everything.get(name)} in the lock files and {version} in constraints.txt")
    for part in (*LOCKS, "cpu"):
        text = (ROOT / "locks" / f"{part}.txt").read_text()
        found += [f"locks/{part}.txt names an address" for _ in re.findall(r"https?:|--index|--find-links", text)]
        for entry in re.split(r"\n(?=[a-z0-9])", text)[1:]:
            if not re.fullmatch(r"[a-z0-9-]+==[^\s\\]+( \\\n    --hash=sha256:[0-9a-f]{64})+\n?", entry):
                found.append(f"locks/{part}.txt: {entry.splitlines()[0]} has no hash")
    if locked("cpu") != {"torch": f"{pinned()['torch']}+cpu"}:
        found.append("locks/cpu.txt is not of the torch of constraints.txt")
    if SBOM.read_text() != sbom():
        found.append(f"{SBOM.name} is not of these lock files")
    return found


def main() -> None:
    """Write or check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if something is out of step")
    if not parser.parse_args().check:
        write()
    if found := faults():
        sys.exit("\n".join([*found, "run `python tools/lock.py`"]))


if __name__ == "__main__":
    main()
