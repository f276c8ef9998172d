"""The built wheel works alone: it holds the default pack, and `probemon watch demo` runs from any folder."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PACK = "probes/wordnet-smollm2-135m"


def python(*arguments, folder, path=""):
    """Run this Python, for the libraries that it has, in a folder; `path` comes before them."""
    environment = {**os.environ, "PYTHONPATH": str(path), "PIP_DISABLE_PIP_VERSION_CHECK": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    """The source archive, made of a copy of what it is made of, without what earlier builds left."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "probemon", source / "probemon", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "probes", source / "probes")
    build = "from setuptools import build_meta; build_meta.build_sdist('dist')"
    done = python("-c", build, folder=source)
    assert done.returncode == 0, done.stderr[-2000:]
    (made,) = (source / "dist").glob("*.tar.gz")
    return made


@pytest.fixture(scope="module")
def installed(archive, tmp_path_factory):
    """A folder into which the wheel was installed, which was built of the source archive, and nothing else."""
    folder = tmp_path_factory.mktemp("wheel")
    with tarfile.open(archive) as opened:
        opened.extractall(folder, filter="data")
    (source,) = folder.iterdir()
    pip = ("-m", "pip", "--quiet")
    done = python(*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), str(source), folder=folder)
    assert done.returncode == 0, done.stderr[-2000:]
    (wheel,) = folder.glob("*.whl")
    # The default packs have 2.5 MB, the ordinary texts 1.5, the library of concepts 2; the other pack has 20.
    assert wheel.stat().st_size < 6.5e6
    done = python(*pip, "install", "--no-deps", "--no-index", "--target", "site", str(wheel), folder=folder)
    assert done.returncode == 0, done.stderr[-2000:]
    return folder / "site"


def test_transformers_newer_than_the_tested_one_is_excluded():
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (bounds,) = (Requirement(line).specifier for line in wanted if line.startswith("transformers"))
    script = (ROOT / "scripts/benchmarks/test_versions.sh").read_text()
    oldest, newest = re.search(r"^oldest=(\S+) newest=(\S+) ", script, re.MULTILINE).groups()
    major, minor, _ = map(int, newest.split("."))
    assert bounds.contains(f"{major}.{minor}.99") and bounds.contains(oldest) and not bounds.contains("4.99")
    assert not bounds.contains(f"{major}.{minor + 1}.0")


def test_wheel_contains_the_packs_and_the_library_byte_for_byte(installed):
    folders = {Path(PACK).name: 4, "concepts-smollm2-135m": 4, "library": 200}
    assert {folder.name for folder in (installed / "probemon/probes").iterdir()} == set(folders)
    for name, least in folders.items():
        there, here = installed / "probemon/probes" / name, ROOT / "probes" / name
        files = {str(file.relative_to(here)): file.read_bytes() for file in here.rglob("*") if file.is_file()}
        found = {str(file.relative_to(there)): file.read_bytes() for file in there.rglob("*") if file.is_file()}
        assert found == files and len(files) >= least


def test_wheel_alone_watches_the_demo_from_any_folder(installed, tmp_path):
    where = python("-c", "import probemon; print(probemon.__file__)", folder=tmp_path, path=installed)
    assert Path(where.stdout.strip()) == installed / "probemon/__init__.py"
    inspected = python("-m", "probemon", "inspect", "demo", "--json", folder=tmp_path, path=installed)
    assert str(installed / "probemon" / PACK) in inspected.stdout, inspected.stderr
    watched = python(
        *("-m", "probemon", "watch", "demo", "--plain", "--max-new-tokens", "5"), folder=tmp_path, path=installed
    )
    assert watched.returncode == 0 and watched.stderr == ""
    assert "demo watched by nouns + concepts" in watched.stdout and "living thing > animal" in watched.stdout
    assert list(tmp_path.iterdir()) == []


def test_wheel_without_the_pack_reports_it(installed, tmp_path):
    bare = shutil.copytree(installed, tmp_path / "bare")
    shutil.rmtree(bare / "probemon/probes")
    done = python("-m", "probemon", "watch", "demo", folder=tmp_path, path=bare)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == (
        "probemon: the pack wordnet-smollm2-135m is not in this installation of probemon: install probemon again\n"
    )


def test_triton_is_wanted_by_its_extra_alone():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {name for name, wanted in project["optional-dependencies"].items() if any("triton" in x for x in wanted)}
    assert not any("triton" in line for line in project["dependencies"]) and extras == {"triton", "dev"}


def test_wheel_metadata_names_authors_extras_and_entry_point(installed):
    (folder,) = installed.glob("probemon-*.dist-info")
    metadata = (folder / "METADATA").read_text().split("\n\n")[0].split("\n")
    assert {"Name: probemon", "Version: 0.1.0", "Author: The probemon authors", "Provides-Extra: demo"} <= set(metadata)
    assert sum(line.startswith("Classifier: ") for line in metadata) >= 8
    assert not any("llama" in line or "Requires-Dist: llm" in line for line in metadata)
    assert (folder / "entry_points.txt").read_text() == (
        "[console_scripts]\nprobemon = probemon.cli:main\n\n"
        "[inspect_ai]\nprobemon = probemon.ops.inspect\n\n"
        "[vllm.endpoint_plugins]\nprobemon = probemon.ops.vllm.plugin:Endpoints\n\n"
        "[vllm.general_plugins]\nprobemon = probemon.ops.vllm.plugin:watch_engines\n"
    )
    assert (installed / "probemon/py.typed").is_file()


@pytest.mark.parametrize(
    "folder", ["lab/corpora/report_page", "lab/training/ordinary", "ops/server/page", "util/page_code"]
)
def test_files_of_pages_and_ordinary_texts_are_installed(installed, folder):
    files = {file.name: file.read_bytes() for file in (ROOT / "probemon" / folder).iterdir() if file.is_file()}
    assert {name: (installed / "probemon" / folder / name).read_bytes() for name in files} == files and files


def test_page_templates_are_installed(installed):
    files = {str(file.relative_to(ROOT)): file.read_bytes() for file in (ROOT / "probemon").rglob("*.html.j2")}
    assert {name: (installed / name).read_bytes() for name in files} == files and len(files) >= 6
