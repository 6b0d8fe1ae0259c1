"""The rules, one file each. The order is the one they run in: a rule sees what those before it have left.

A new rule is a file here with a `RULE`, and an entry in `ALL`.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from tilewright.errors import UserError
from tilewright.optimize.rule import Rule
from tilewright.optimize.rules import (
    add_norm,
    attention,
    cross_entropy,
    embedding,
    gelu,
    gelu_mlp,
    glu,
    glu_mlp,
    linear,
    linear_cross_entropy,
    mask,
    norm,
    rope,
)  # fmt: skip

ALL: dict[str, Rule] = {
    each.RULE.name: each.RULE
    for each in (
        linear_cross_entropy, cross_entropy, add_norm, norm, glu_mlp, glu, gelu_mlp, gelu, rope, embedding, mask,
        attention, linear,
    )
}  # fmt: skip


def chosen(rules: Sequence[str] | str | None) -> list[Rule]:
    """The rules of these names, in the order they run in; all of them for None.

    >>> [rule.name for rule in chosen("norm,glu")], chosen("glu+norm") == chosen(["norm", "glu"])
    (['norm', 'glu'], True)
    """
    if rules is None or rules == "all":
        return list(ALL.values())
    words = rules.replace("+", ",").split(",") if isinstance(rules, str) else rules
    names = [each.strip() for each in words if each.strip()]
    names = [] if names == ["none"] else names
    for name in names:
        if name not in ALL:
            near = difflib.get_close_matches(name, ALL, n=1)
            hint = f"did you mean {near[0]}?" if near else f"choose all, none, or some of {', '.join(ALL)}."
            raise UserError(f"There is no rule {name!r}; {hint}")
    return [rule for name, rule in ALL.items() if name in names]
