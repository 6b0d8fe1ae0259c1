"""Which rules an implementation of the benchmark of models leaves out."""

from tilewright.bench import models
from tilewright.optimize.rules import ALL


def test_an_implementation_leaves_out_the_rule_that_it_names():
    for name in {name for case in models.CASES for name in case["implementations"]}:
        left_out = set(ALL) - set(models.rules_of(name))
        assert left_out == ({name.rsplit(" ", 1)[1]} if "without" in name else set())
