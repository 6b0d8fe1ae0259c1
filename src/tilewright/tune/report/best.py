"""best.yaml and best.py: the best run of a study as files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from tilewright.measure.results import write_text
from tilewright.train.load_config import write_yaml
from tilewright.tune.report.answer import Answer
from tilewright.tune.report.code import script
from tilewright.tune.search.space import Space


def write_best(answer: Answer, space: Space, folder: Path, *, code: bool = False) -> None:
    """Write best.yaml: a whole run for `tilewright train`; of somebody's own model, the levers alone.

    Args:
        answer, space: of the study.
        folder: where to.
        code: also write best.py, which calls the factory of the model. Never of a study that was received: whose
            factory that is, its sender says.
    """
    path, program = folder / "best.yaml", folder / "best.py"
    if not answer.recommended or answer.best is None:
        path.unlink(missing_ok=True)  # of an earlier answer
        if code:
            program.unlink(missing_ok=True)
    elif answer.generates:
        write_text(path, yaml.safe_dump({**answer.start, **answer.best.point}, sort_keys=False))
    elif not answer.own_model:
        write_yaml(space.at(answer.best.point), path)
    else:
        write_text(path, yaml.safe_dump(own_levers(answer), sort_keys=False))
        if code:
            write_text(program, script(answer.own_model, answer.best.point, space.device, answer.rule_names))


def own_levers(answer: Answer) -> dict[str, Any]:
    """The best.yaml of a user's own model: its name, which `tilewright train` refuses, and the best run's levers."""
    tree: dict[str, Any] = {"own_model": answer.own_model}
    for name, value in (answer.best.point if answer.best else {}).items():
        section, _, field = name.rpartition(".")
        (tree.setdefault(section, {}) if section else tree)[field] = value
    return tree
