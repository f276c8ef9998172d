#!/usr/bin/env bash
# A sample of the tests with another transformers, torch or Python, in an environment of its own. Safe to repeat.
#   bash scripts/benchmarks/test_versions.sh oldest        # the oldest supported transformers
#   PYTHON=python3.13 bash scripts/benchmarks/test_versions.sh newest -n 2        # the newest one; options of pytest
#   TORCH=2.15.0 bash scripts/benchmarks/test_versions.sh 5.23.0
set -euo pipefail
cd "$(dirname "$0")/../.."
export HF_HUB_OFFLINE=1 PIP_DISABLE_PIP_VERSION_CHECK=1
oldest=5.0.0 newest=5.24.0  # of transformers; tests/test_wheel.py compares the requirements with the newest
which=${1:?give oldest, newest or a version of transformers}; shift
case $which in oldest|newest) transformers=${!which};; *) transformers=$which;; esac
python=${PYTHON:-python3} torch=${TORCH:-$(sed -n 's/^torch==//p' constraints.txt)}
venv=.venv-versions/$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')-$torch-$transformers
others=(transformers=="$transformers" torch=="$torch")
# What this transformers asks for is older than constraints.txt has it; the rest is as pinned there.
if [ "$transformers" = $oldest ]; then
  others+=(huggingface_hub==1.33.0 tokenizers==0.22.2 typer-slim==0.24.0 httpx==0.28.1 httpcore==1.0.9)
fi
stamp=$(cat constraints.txt pyproject.toml scripts/benchmarks/test_versions.sh | sha256sum | cut -d' ' -f1)
if [ "$(cat "$venv/.probemon-stamp" 2>/dev/null)" != "$stamp" ]; then
  echo "== setting up $venv (once; minutes, and 5 GB if this torch is a build for CUDA)"
  [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
  pip() { "$venv/bin/python" -m pip "$@" 2> >(grep -v "^WARNING: Location" >&2); }
  # torch first: anything else that asks for it would fetch the newest build. One for CUDA brings a triton of its own.
  pip install -q torch=="$torch"
  if "$venv/bin/python" -c "import triton" 2> /dev/null; then
    others+=("$(pip freeze | grep ^triton==)")
  fi
  names=$(printf '%s\n' "${others[@]}" | sed 's/==.*//' | paste -sd'|')
  { grep -vE "^($names)==" constraints.txt; printf '%s\n' "${others[@]}"; } > "$venv/constraints.txt"
  pip install -q -c "$venv/constraints.txt" -e '.[corpus,demo,metrics,serve,triton]' \
    pytest pytest-xdist hypothesis peft pandas
  pip install -q -c "$venv/constraints.txt" --no-deps --upgrade --target "$venv/torchao" torchao  # apart, as in env.sh
  echo "$stamp" > "$venv/.probemon-stamp"
fi
"$venv/bin/python" -c "import sys, torch, transformers as t; print('== Python', sys.version.split()[0], 'torch', torch.__version__, 'transformers', t.__version__)"
tests=(tests/{core,tracking,host,monitor,packs,cli} tests/engine/test_{hidden,cascade,compiled}.py
  tests/test_{copies,manager,light_imports,way_of_a_state}.py tests/adapters/{ltm,routing} tests/adapters/bem/test_bem{,_cache}.py)
OMP_NUM_THREADS=1 "$venv/bin/python" -m pytest "${tests[@]}" "$@"
