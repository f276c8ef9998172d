#!/usr/bin/env bash
# On a machine with a GPU, torch and triton and no network: the GPU tests (under compute-sanitizer, too, where it works), then the benchmark,
# which writes docs/benchmarks/<gpu>.json.
set -euo pipefail
cd "$(dirname "$0")/.."
export TRITON_INTERPRET=0 HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
python=${PYTHON:-python3}
[ -x .venv/bin/python ] && python=${PYTHON:-.venv/bin/python}
$python -c "import torch; assert torch.cuda.is_available(), 'no GPU here'; print(torch.cuda.get_device_name(), torch.__version__)"
$python -m pytest -m gpu tests/test_gpu.py "$@"
if command -v compute-sanitizer > /dev/null; then
  compute-sanitizer --error-exitcode 3 $python -m pytest -m gpu tests/test_gpu.py -k "bitwise and 2560" || echo "compute-sanitizer: exit $? (it does not work on every machine)"
fi
name=$($python -c "import re, torch; print(re.sub('[^a-z0-9]+', '-', torch.cuda.get_device_name().lower()).strip('-'))")
$python scripts/benchmark.py --suite gpu --json "docs/benchmarks/$name.json" | tee "docs/benchmarks/$name.txt"
