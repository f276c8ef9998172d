"""What the Triton kernels need of a GPU, on paper: one launch compiled for one chip, and the arithmetic beside it.

Triton compiles nothing in its interpreter, in which these tests run: the script has a process of its own.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from triton.backends.nvidia import __file__ as backend

import kernel_resources

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "benchmarks" / "kernel_resources.py"
needs_ptxas = pytest.mark.skipif(
    not (Path(backend).parent / "bin" / "ptxas").is_file(), reason="this build of Triton has no ptxas"
)


def run(*arguments, code=None):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(SCRIPT.parent)])
    command = [sys.executable, "-W", "error", *(["-c", code] if code else [str(SCRIPT)]), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@needs_ptxas
def test_a_launch_is_the_launchers_own_and_its_time_is_that_of_its_bytes(tmp_path):
    done = run("--kernel", "_layered", "--chip", "90", "--json", str(tmp_path / "out.json"))
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads((tmp_path / "out.json").read_text())
    rows = {(row["hidden"], row["dtype"]): row for row in found["rows"]}
    assert not found["ran_on_a_gpu"] and found["rows"] == [json.loads(line) for line in done.stdout.splitlines()]
    assert set(rows) == {(d, "float32") for d in (576, 2560, 4096)}
    assert all(row["sm"] == 90 and row["programs"] == 64 * 128 // 16 and "error" not in row for row in rows.values())
    for (d, _), row in rows.items():
        size, n_weights = 4, 128 * d + 64 * 128 + 64
        of_probe = size * n_weights + 4 * (128 + 64 + 1)  # biases
        pairs = 64 * 2 * 8  # a row and a slot each
        assert row["bytes_read"] == 64 * of_probe + pairs + d * size and row["bytes_written"] == 64 * 4
        assert row["flops"] == 64 * 2 * n_weights
        assert row["read_us"] == pytest.approx(1e6 * row["bytes_read"] / 3.35e12)
        assert row["widest_load"] == 16 and row["fused"] and not row["matrix_unit"]
        assert 32 < row["registers"] < 255 and 0 < row["dynamic_shared"] < 8192 and row["num_warps"] == 4


def test_what_does_not_compile_is_a_row_that_says_so():
    def of(launch, chip):
        raise RuntimeError("out of registers")

    launch = SimpleNamespace(name="_begin", what="a descent", hidden=576, dtype="bfloat16", programs=1, named={})
    row = kernel_resources.row(launch, 80, SimpleNamespace(of=of))
    assert row["error"] == "RuntimeError: out of registers" and row["sm"] == 80 and "registers" not in row


def test_no_launch_lets_products_be_fused_with_sums_and_each_kernel_of_the_package_is_among_them():
    """Which ones a compiler takes is its own choice, and it decides the bits."""
    done = run(
        code="""
import json, kernel_resources as script
print(json.dumps([(launch.name, launch.options.get("enable_fp_fusion")) for launch in script.launches()]))
"""
    )
    assert done.returncode == 0, done.stderr[-2000:]
    launches = json.loads(done.stdout)
    assert all(fused is False for _, fused in launches)
    assert {name for name, _ in launches} == {
        "_layered", "_layered_groups", "_states", "_linear", "_normalise", "_begin", "_score", "_share", "_expand",
        "_finish", "_shares", "_over_rows", "_over_columns", "features", "step", "step_back", "features_back",
    }  # fmt: skip


@pytest.mark.parametrize(
    "chip, registers, shared, num_warps, expected",
    [
        (90, 32, 1024, 4, (16, "warps")),
        (90, 72, 1024, 4, (7, "registers")),  # 7 warps of 2,304 registers in each quarter
        (80, 255, 0, 4, (2, "registers")),
        (90, 65, 0, 8, (3, "registers")),  # 72 are given out to each thread
        (80, 32, 163 << 10, 4, (1, "shared memory")),  # with 1 KB of the system's: all of it
        (80, 32, (163 << 10) + 1, 4, (0, "shared memory")),
        (90, 32, 75 << 10, 4, (3, "shared memory")),
        (100, 16, 0, 1, (32, "programs")),
    ],
)
def test_as_many_programs_reside_as_cuda_says(chip, registers, shared, num_warps, expected):
    limits = kernel_resources.CHIPS[chip]
    assert kernel_resources.resident_programs(limits, registers, shared, num_warps) == expected


def test_the_interpreter_is_refused(monkeypatch, capsys):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(sys, "argv", ["kernel_resources.py"])
    with pytest.raises(SystemExit, match="2"):
        kernel_resources.main()
    assert "TRITON_INTERPRET=1 is set" in capsys.readouterr().err
