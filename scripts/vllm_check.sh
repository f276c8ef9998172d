#!/usr/bin/env bash
# Runs vLLM's real engine, watched, on the demo model, and writes docs/benchmarks/vllm.json. Safe to repeat: what was
# found already stays: empty build/vllm after a change of the adapter. Some 20 minutes on 2 cores, the environment not counted.
# --only PART ... runs some parts; --folder says where they are kept.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/vllm_env.sh
export PYTHONPATH="$PWD:$PWD/scripts/benchmarks" HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1
python=${VLLM_ENV:-.venv-vllm}/bin/python
"$python" -m pytest -q -p no:cacheprovider --noconftest -c /dev/null tests/ops/vllm/test_engine_internals.py
exec "$python" scripts/benchmarks/vllm_check.py --folder build/vllm --json docs/benchmarks/vllm.json "$@"
