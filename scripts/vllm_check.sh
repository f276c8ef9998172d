#!/usr/bin/env bash
# Runs vLLM's real engine, watched, on the demo model, and writes docs/benchmarks/vllm.json. Safe to repeat: what was
# found already stays: empty build/vllm after a change of the adapter. Some 40 minutes on 2 cores, the environment not counted.
# --only PART ... runs some parts; --newer VERSION also tries a version that has no build for CPUs.
# --gpu runs on a GPU, by the vLLM of the present environment, and writes build/vllm_gpu.json.
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD:$PWD/scripts/benchmarks" HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1
internals="-m pytest -q -p no:cacheprovider --noconftest -c /dev/null tests/ops/vllm/test_engine_internals.py"
if [ "${1:-}" = --gpu ]; then
  python $internals
  exec python scripts/benchmarks/vllm_check.py --folder build/vllm-gpu --json build/vllm_gpu.json "$@"
fi
bash scripts/vllm_env.sh
python=${VLLM_ENV:-.venv-vllm}/bin/python
for argument in "$@"; do
  if [ "${before:-}" = --newer ]; then
    bash scripts/vllm_newer.sh "$argument"
    PYTHONPATH="build/vllm-$argument:$PYTHONPATH" "$python" $internals
  fi
  before=$argument
done
"$python" $internals
exec "$python" scripts/benchmarks/vllm_check.py --folder build/vllm --json docs/benchmarks/vllm.json "$@"
