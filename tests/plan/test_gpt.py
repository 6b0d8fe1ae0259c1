import re
import subprocess
import sys

import pytest

from tilewright.errors import UserError
from tilewright.plan.gpt import preset

# Published parameter counts of the presets (llm-foundry's benchmark tables; vocabulary 50,368, 2048 positions).
PUBLISHED = {"7b": 6658859008, "13b": 12853954560, "30b": 29975214080, "70b": 64862437376}


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_have_the_published_number_of_parameters(name):
    assert preset(name).parameters == PUBLISHED[name]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("13B", "'13B'; did you mean 13b? Choose one of"),
        ("model.preset=1b", "did you mean 1b? Choose one of"),
        ("x", "'x'; choose one of 125m"),
    ],
)
def test_an_unknown_preset_names_the_nearest(name, said):
    with pytest.raises(UserError, match=re.escape(said)):
        preset(name)


def test_planning_imports_few_modules_and_no_torch():
    """What makes a start slow is what is imported, and a count does not depend on the machine: it takes 0.1 s idle."""
    code = (
        "import tilewright.plan.parallel, tilewright.plan.roofline, tilewright.plan.batches, tilewright.hardware as h\n"
        "h.table(); import sys; print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found = done.stdout.split()
    foreign = {name.partition(".")[0] for name in found} - sys.stdlib_module_names - {"tilewright", "__main__"}
    assert not foreign & {"torch", "numpy", "yaml", "omegaconf", "rich", "typer", "plotly", "optuna"}
    assert len(found) < 250  # 136 when this was written
