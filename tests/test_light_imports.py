"""Importing the manager imports no compiler and no optional package; without Triton all but its kernels works."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
MANAGER = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer
before = set(sys.modules)
from probemon import DynamicProbeManager
print(*sorted(set(sys.modules) - before))
"""
HEAVY = {"accelerate", "datasets", "numba", "pandas", "peft", "pyarrow", "scipy", "sklearn", "sympy", "triton"}
HEAVY |= {"torch._dynamo", "torch._inductor", "torch.distributed.tensor", "transformers.modeling_utils"}
WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
import pkgutil, tempfile, torch, probemon
from conftest import make_model, make_pack
from probemon import DynamicProbeManager
from probemon.adapters.bem.update import check_update_impl
from probemon.errors import KernelUnavailable

OF_TRITON = ("probemon.engine.kernels.triton_", "probemon.engine.device_steps", "probemon.engine.ways.on_device")
OTHERS = ("probemon.adapters.bem.kernels.", "probemon.ops.vllm.", "probemon.__main__")
for module in pkgutil.walk_packages(probemon.__path__, "probemon."):
    if module.name.startswith((*OF_TRITON, *OTHERS)):
        continue
    try:
        __import__(module.name)
    except ImportError as error:
        assert "triton" not in str(error), (module.name, error)

model = make_model()
pack = make_pack(tempfile.mkdtemp() + "/pack", model)
states, ids = torch.randn(7, 16), torch.tensor([[5, 9, 3]])
expected = DynamicProbeManager(pack, impl="reference").score_all(states)
for impl in ("numba", "cpu"):
    assert abs(DynamicProbeManager(pack, impl=impl).score_all(states) - expected).max() < 1e-5
with DynamicProbeManager(pack).attach(model) as run:
    out = model.generate(ids, max_new_tokens=3, do_sample=False, eos_token_id=None)
assert len(run.result(out)) == 5
for ask in (
    lambda: DynamicProbeManager(pack, impl="triton"),
    lambda: check_update_impl("triton", torch.device("cpu")),
):
    try:
        ask()
    except KernelUnavailable as error:
        assert "pip install 'probemon[triton]'" in str(error), error
    else:
        raise AssertionError("a kernel of Triton was given")
"""


def python(code):
    path = os.pathsep.join(
        [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests/support"), os.environ.get("PYTHONPATH", "")]
    )
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )


def test_manager_imports_no_compiler_and_no_optional_package():
    done = python(MANAGER)
    assert done.returncode == 0, done.stderr
    imported = set(done.stdout.split())
    assert "probemon.monitor.run" in imported and imported & HEAVY == set()


def test_without_triton_all_but_its_kernels_works():
    done = python(WITHOUT_TRITON)
    assert done.returncode == 0, done.stderr[-3000:]
