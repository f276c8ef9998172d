#!/usr/bin/env bash
# On a machine with a GPU, torch and triton and no network: the GPU tests, the benchmark, which writes
# docs/benchmarks/<gpu>.json, and a test under compute-sanitizer, where it works. A test that fails does not keep the
# rest from running; the exit status tells of it. Arguments are pytest's, such as -n 8.
set -euo pipefail
cd "$(dirname "$0")/../.."
export TRITON_INTERPRET=0 HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
python=${PYTHON:-python3}
[ -x .venv/bin/python ] && python=${PYTHON:-.venv/bin/python}
failed=0
$python -c "import torch; assert torch.cuda.is_available(), 'no GPU here'; print(torch.cuda.get_device_name(), torch.__version__)"
# Warnings are errors in this project; other versions of torch than the pinned one may warn.
$python -m pytest -W default -m gpu tests/engine/test_gpu.py tests/adapters/bem/test_bem_triton.py tests/adapters/bem/test_bem_controller_triton.py tests/adapters/routing/test_routing.py tests/engine/test_several_packs.py "$@" || failed=1
# Every kernel compiled for every chip at every size; the gate compiles each once.
PROBEMON_EVERY_SIZE=1 $python -m pytest -W default -k every_kernel_compiles tests/engine/test_triton.py tests/adapters/bem/test_bem_triton.py tests/adapters/bem/test_bem_controller_triton.py || failed=1
# Hosts in formats that torchao has for CUDA alone, with an adapter on them.
if $python -c "import torchao" 2> /dev/null; then $python scripts/benchmarks/bem_on_gpu.py || failed=1; fi
name=$($python -c "import re, torch; print(re.sub('[^a-z0-9]+', '-', torch.cuda.get_device_name().lower()).strip('-'))")
$python scripts/benchmark.py --suite gpu --json "docs/benchmarks/$name.json" | tee "docs/benchmarks/$name.txt" || failed=1
if command -v compute-sanitizer > /dev/null && compute-sanitizer --error-exitcode 3 $python -c "import torch; torch.zeros(1).cuda()" > /dev/null; then
  compute-sanitizer --error-exitcode 3 $python -m pytest -W default -m gpu tests/engine/test_gpu.py -k "overflows and 128" || failed=1
fi
exit $failed
