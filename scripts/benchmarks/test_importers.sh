#!/usr/bin/env bash
# The importers on files that the other projects' own packages write, in an environment with those packages. Safe to repeat.
set -euo pipefail
cd "$(dirname "$0")/../.."
export HF_HUB_OFFLINE=1 PIP_DISABLE_PIP_VERSION_CHECK=1 WANDB_MODE=disabled
venv=.venv-importers
stamp=$(cat constraints.txt constraints-importers.txt pyproject.toml scripts/benchmarks/test_importers.sh | sha256sum | cut -d' ' -f1)
if [ "$(cat $venv/.probemon-stamp 2>/dev/null)" != "$stamp" ]; then
  echo "== setting up $venv (once; a few minutes)"
  [ -x $venv/bin/python ] || "${PYTHON:-python3}" -m venv $venv
  pip() { $venv/bin/python -m pip "$@" 2> >(grep -v "^WARNING: Location" >&2); }
  # torch first and pinned: anything else that asks for it would fetch the newest build.
  pip install -q -c constraints.txt torch==2.13.0
  pip install -q -c constraints.txt -c constraints-importers.txt -e '.[cpu]' pytest scikit-learn probelab probekit steerkit sae-lens \
    lie-detectors gguf
  pip install -q --no-deps repeng==0.4.0  # asks for numpy 1, which it does not need here
  echo "$stamp" > $venv/.probemon-stamp
fi
# Those packages warn, of each other for the most part; ours are held to account in the other tests.
OMP_NUM_THREADS=1 $venv/bin/python -m pytest -W ignore tests/lab/importers_real/real_*.py "$@"
