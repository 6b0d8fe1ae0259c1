"""Docs, docstrings and comments name files of the repository that are there, and names that are in them."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
FILES = [
    path
    for folder in ("src", "docs", "tests", "tools", "examples")
    for path in (ROOT / folder).rglob("*.*")
    if path.is_file() and "__pycache__" not in path.parts
] + [path for path in ROOT.glob("*.*") if path.is_file()]
NAMES = {"/" + str(path.relative_to(ROOT)): path for path in FILES}
TEXTS = [path for path in FILES if path.suffix in (".md", ".py", ".cu", ".cuh", ".cpp") and "tests" not in path.parts]
# A user's files, files of other projects, and what is generated.
FOREIGN = {"my_model.py", "models/auto/modeling_auto.py", "user_stages.cuh"}

_PATH = re.compile(r"(?<![\w./<>{}*~$-])((?:\.\./)*(?:[\w-]+/)*[\w-]+\.(?:py|cu|cuh|cpp|md))\b(?![\w/*(])")
_INSIDE = re.compile(r"`(\w+)`,? (?:in|of|from) `((?:[\w-]+/)*[\w-]+\.py)`")


def places(path):
    """The files that a text may mean by a path: it is written from the folder that the text is about."""
    return [file for name, file in NAMES.items() if name.endswith("/" + path)]


def test_every_file_that_a_text_names_is_there():
    missing = [
        f"{text.relative_to(ROOT)}: {path}"
        for text in TEXTS
        for path in (found.replace("../", "") for found in _PATH.findall(text.read_text(encoding="utf-8")))
        if path not in FOREIGN and not places(path)
    ]
    assert not missing


def test_what_the_docs_say_to_be_in_a_file_is_there():
    """As in "`NAME` of `plan/memory.py`": a name that has moved, or has another name now, is found here."""
    told = [
        (text, name, path)
        for text in TEXTS
        if text.suffix == ".md"
        for name, path in _INSIDE.findall(re.sub(r"\s+", " ", text.read_text(encoding="utf-8")))
    ]
    lost = [
        f"{text.relative_to(ROOT)}: {name} of {path}"
        for text, name, path in told
        if not any(re.search(rf"\b{name}\b", file.read_text(encoding="utf-8")) for file in places(path))
    ]
    assert len(told) > 20 and not lost
