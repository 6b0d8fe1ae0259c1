"""Ask a database of known vulnerabilities (OSV) about every package of the lock files.

    python tools/audit.py

Exit code 1 where something is known of a version that we install, with what. Where the database cannot be reached it
says so and exits with 0: nothing was checked.
"""

from __future__ import annotations

import argparse
import json
import sys
import urllib.error
import urllib.request
from typing import Any

from lock import LOCKS, locked

SERVICE = "https://api.osv.dev/v1/querybatch"


def ask(packages: list[tuple[str, str]], service: str) -> list[list[str]]:
    """The identifiers of what is known of each package; raises OSError or ValueError where there is no answer."""
    queries = [{"package": {"name": name, "ecosystem": "PyPI"}, "version": version} for name, version in packages]
    request = urllib.request.Request(
        service, json.dumps({"queries": queries}).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        found: Any = json.load(answer)
    results = found["results"] if isinstance(found, dict) else None
    if not isinstance(results, list) or len(results) != len(packages):
        raise ValueError("the answer is not of this question")
    return [[str(each["id"]) for each in (result or {}).get("vulns", [])] for result in results]


def main(arguments: list[str] | None = None) -> int:
    """Check everything; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--service", default=SERVICE, help="the address to ask")
    options = parser.parse_args(arguments)
    packages = sorted({item for part in LOCKS for item in locked(part).items()})
    try:
        answers = ask(packages, options.service)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        print(f"Not checked: {options.service} gave no answer ({error}). Run `make audit` where it can be reached.")
        return 0
    bad = [(item, known) for item, known in zip(packages, answers, strict=True) if known]
    for (name, version), known in bad:
        print(f"{name} {version}: {', '.join(known)}")
    print(f"{len(packages)} packages checked, {len(bad)} with known vulnerabilities.")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
