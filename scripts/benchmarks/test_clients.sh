#!/usr/bin/env bash
# Clients of OpenAI's API against `probemon serve` with the demo model: what they read is compared with plain forwards.
# In an environment of its own, build/clients, which sees the packages of .venv (scripts/test.sh makes it). Safe to repeat.
#   bash scripts/benchmarks/test_clients.sh --output docs/benchmarks/clients.json
set -euo pipefail
cd "$(dirname "$0")/../.."
export HF_HUB_OFFLINE=1 PIP_DISABLE_PIP_VERSION_CHECK=1 LITELLM_LOCAL_MODEL_COST_MAP=True DO_NOT_TRACK=1
venv=build/clients
stamp=$(cat constraints.txt constraints-clients.txt scripts/benchmarks/test_clients.sh | sha256sum | cut -d' ' -f1)
if [ "$(cat $venv/.probemon-stamp 2>/dev/null)" != "$stamp" ]; then
  echo "== setting up $venv (once; a minute)"
  [ -x $venv/bin/python ] || .venv/bin/python -m venv $venv
  site='import sysconfig; print(sysconfig.get_path("purelib"))'
  .venv/bin/python -c "$site" > "$($venv/bin/python -c "$site")/gate.pth"
  # Of some packages, litellm takes only newer ones than constraints.txt has.
  names=$(sed 's/==.*//' constraints-clients.txt | paste -sd'|')
  { grep -vE "^($names)==" constraints.txt; cat constraints-clients.txt; } > $venv/constraints.txt
  $venv/bin/python -m pip install -q -c $venv/constraints.txt langchain-openai litellm 'lm-eval[api]' \
    2> >(grep -v "^WARNING: Location" >&2)
  echo "$stamp" > $venv/.probemon-stamp
fi
OMP_NUM_THREADS=1 PYTHONPATH=.:scripts/benchmarks $venv/bin/python scripts/benchmarks/clients.py "$@"
