"""Where and from what a result file was made."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import torch

import probemon

ROOT = Path(__file__).resolve().parents[2]


def about() -> dict[str, Any]:
    """Return what a result file says of itself: the commit and the machine."""
    return {"commit": commit(), "machine": machine()}


def machine() -> dict[str, Any]:
    """Processor, threads and versions."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }


def commit() -> str | None:
    """The commit of the package that runs, or None outside a repository. An editable install may be of another clone
    than the script that measures.
    """
    where = Path(probemon.__file__).parent
    try:
        found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=where, capture_output=True, text=True, check=False)
    except OSError:  # no git here
        return None
    return found.stdout.strip() if found.returncode == 0 else None
