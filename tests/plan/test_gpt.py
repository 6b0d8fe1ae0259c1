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


def test_an_unknown_preset_names_the_nearest():
    with pytest.raises(UserError, match="did you mean '13b'"):
        preset("13B")


def test_planning_imports_no_torch_and_is_quick():
    code = (
        "import time; t = time.perf_counter()\n"
        "import tilewright.plan.parallel, tilewright.plan.roofline, tilewright.plan.batches, tilewright.hardware as h\n"
        "h.table(); import sys; assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
        "print(time.perf_counter() - t)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 0.5  # well under 0.1 s on an idle machine
