#!/usr/bin/env bash
# Environment, lint, types and all tests. Safe to repeat.
set -euo pipefail
. "$(dirname "$0")/env.sh"
if once test; then
  echo "== what the tests need, on top (once; a few minutes)"
  pip install -q -c constraints.txt -e '.[corpus,demo,dev,metrics,otel,ray,serve]'
  # Apart: where transformers can import torchao it does, always, and talks about it. Only a test of quantised hosts uses it.
  pip install -q -c constraints.txt --no-deps --upgrade --target .venv/torchao torchao
  done_once test
fi
# The report's page is tested in a real browser, metrics by a real Prometheus; without these such tests are skipped, and say so.
missing=(); for name in chromium prometheus; do command -v "$name" > /dev/null || missing+=("$name"); done
if [ ${#missing[@]} -gt 0 ] && [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null; then
  echo "== ${missing[*]} (once)"
  { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}"; } > /dev/null 2>&1 || echo "   could not be installed"
fi
part() { local now=$SECONDS; [ -z "${part:-}" ] || echo "   $part took $((now - began)) s"; part=$1 began=$now; [ -z "$1" ] || echo "== $1"; }
export PYTHONDONTWRITEBYTECODE=  # tests start many processes, which would each compile us anew
part ruff; .venv/bin/ruff check .; .venv/bin/ruff format --check -q .
part imports; .venv/bin/lint-imports --no-cache > /dev/null || { .venv/bin/lint-imports --no-cache; exit 1; }
types=$(mktemp); log=$(mktemp); trap 'rm -f "$types" "$log"' EXIT
.venv/bin/mypy > "$types" 2>&1 & checking=$!  # beside the tests: alone it would leave a core idle
failed=0
part pytest
OMP_NUM_THREADS=1 .venv/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations 25 "$@" | tee "$log" || failed=$?
sed -n '/ slowest /,$p' "$log" | grep -E '^[0-9.]+s ' > slowest-tests.txt || true  # what to look at first where the gate takes long
part mypy; wait $checking || failed=1; cat "$types"
part ""; exit $failed
