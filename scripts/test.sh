#!/usr/bin/env bash
# Environment, lint, types and all tests. Safe to repeat.
set -euo pipefail
. "$(dirname "$0")/env.sh"
echo "== ruff"; .venv/bin/ruff check .
echo "== mypy"; .venv/bin/mypy
echo "== pytest"; OMP_NUM_THREADS=1 .venv/bin/python -m pytest "$@"
