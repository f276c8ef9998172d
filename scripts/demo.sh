#!/usr/bin/env bash
# Watch a real model with a real pack: sets up what it needs and no more, generates, shows concepts token by token.
# Options: --prompt TEXT, --max-new-tokens N, --plain, --json.
set -euo pipefail
. "$(dirname "$0")/env.sh" >&2
# One thread: a step of several stalls whenever another process takes a core, and its time then says nothing.
exec .venv/bin/python -m probemon watch demo --measure --threads 1 "$@"
