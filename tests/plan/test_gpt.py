import subprocess
import sys

import pytest

from tilewright.errors import UserError
from tilewright.plan.gpt import mfu, preset

# Published parameter counts of the presets (llm-foundry's benchmark tables; vocabulary 50,368, 2048 positions).
PUBLISHED = {"7b": 6658859008, "13b": 12853954560, "30b": 29975214080, "70b": 64862437376}


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_have_the_published_number_of_parameters(name):
    assert preset(name).parameters == PUBLISHED[name]


def test_mfu_reproduces_a_published_run():
    # 70b on 512 H100: 1007 tokens a second and GPU, 41.25 % by 6N + 12Lhs.
    assert mfu(515636 / 512, preset("70b").flops_per_token, 989.5e12) == pytest.approx(0.4125, abs=1e-4)


def test_more_than_all_of_the_peak_is_an_error_that_says_where_to_look():
    with pytest.raises(UserError, match="cannot be: check the accelerator"):
        mfu(1e6, preset("1b").flops_per_token, 312e12)


def test_an_unknown_preset_names_the_nearest():
    with pytest.raises(UserError, match="did you mean '13b'"):
        preset("13B")


def test_planning_imports_no_torch_and_is_quick():
    code = (
        "import time; t = time.perf_counter()\n"
        "import tilewright.plan.gpt, tilewright.plan.cost, tilewright.hardware as h\n"
        "h.table(); import sys; assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
        "print(time.perf_counter() - t)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 0.5  # well under 0.1 s on an idle machine
