#!/usr/bin/env bash
# The attribution tests with the oldest supported transformers, in a second environment. Safe to repeat.
set -euo pipefail
cd "$(dirname "$0")/../.."
export HF_HUB_OFFLINE=1 PIP_DISABLE_PIP_VERSION_CHECK=1
venv=.venv-oldest
# What this transformers asks for is older than constraints.txt has it; the rest is as pinned there.
oldest=(transformers==5.0.0 huggingface_hub==1.33.0 tokenizers==0.22.2 typer-slim==0.24.0 httpx==0.28.1 httpcore==1.0.9)
stamp=$(cat constraints.txt pyproject.toml scripts/benchmarks/test_oldest.sh | sha256sum | cut -d' ' -f1)
if [ "$(cat $venv/.probemon-stamp 2>/dev/null)" != "$stamp" ]; then
  echo "== setting up $venv (once; a minute or two)"
  [ -x $venv/bin/python ] || "${PYTHON:-python3}" -m venv $venv
  pip() { $venv/bin/python -m pip "$@" 2> >(grep -v "^WARNING: Location" >&2); }
  names=$(printf '%s\n' "${oldest[@]}" | sed 's/==.*//' | paste -sd'|')
  { grep -vE "^($names)==" constraints.txt; printf '%s\n' "${oldest[@]}"; } > $venv/constraints.txt
  # torch first and pinned: anything else that asks for it would fetch the newest build.
  pip install -q -c $venv/constraints.txt torch==2.13.0
  pip install -q -c $venv/constraints.txt -e '.[cpu,corpus,demo]' pytest hypothesis peft
  pip install -q -c $venv/constraints.txt --no-deps --upgrade --target $venv/torchao torchao  # apart, as in env.sh
  echo "$stamp" > $venv/.probemon-stamp
fi
tests=(tests/{tracking,host,monitor} tests/engine/test_hidden.py tests/test_{sinks,copies}.py tests/adapters/routing/test_routing{,_adapters}.py)
OMP_NUM_THREADS=1 $venv/bin/python -m pytest "${tests[@]}" "$@"
