#!/usr/bin/env bash
# Builds the site of the documentation into site/: sets up .venv-docs once, and ends with an error on any warning, a link or
# an anchor that leads nowhere, a page that the navigation leaves out, or a page that would load something from elsewhere.
# Look at it: open site/index.html (search works there, too).
set -euo pipefail
cd "$(dirname "$0")/.."
export PIP_DISABLE_PIP_VERSION_CHECK=1 NO_MKDOCS_2_WARNING=1
stamp=$(cat constraints-docs.txt pyproject.toml scripts/docs.sh | sha256sum | cut -d' ' -f1)
if [ "$(cat .venv-docs/.probemon-stamp 2>/dev/null)" != "$stamp" ]; then
  echo "== setting up .venv-docs (once)"
  [ -x .venv-docs/bin/python ] || "${PYTHON:-python3}" -m venv .venv-docs
  # The pages need neither torch nor probemon itself: its sources are read, not run.
  grep -v '^#' constraints-docs.txt | .venv-docs/bin/python -m pip install -q -r /dev/stdin 2> >(grep -v "^WARNING: Location" >&2)
  echo "$stamp" > .venv-docs/.probemon-stamp
fi
echo "== docs"
.venv-docs/bin/mkdocs build --strict  # not --quiet: it would hide warnings from --strict, too
.venv-docs/bin/python scripts/docs_check.py site
echo "   docs took $SECONDS s: site/index.html"
