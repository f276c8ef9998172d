"""A first start without a home or a writable folder works and says so in one line, or names the variable to set."""

import errno
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from huggingface_hub import constants
from safetensors import SafetensorError

import probemon
from probemon import ProbePack, bundled
from probemon.engine.kernels import cache_folder
from probemon.errors import ConfigError, PackError
from probemon.host.loading import load_model
from probemon.util import cache_folders
from probemon.util.cache_folders import cache_dir, kept

ROOT = Path(probemon.__file__).parents[1]
NOBODY, NAMELESS = 65534, 54321  # one in the table of users, whose home does not exist, and one that is in none
# Reads what only root may read, such as this Python; writes nothing that is not its own.
AS = ["setpriv", "--clear-groups", "--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
READ_ONLY = "mount --make-rprivate / && mount -o remount,ro,bind / && mount -t tmpfs none /dev/shm -o ro && cd /"
MANAGER = "from probemon import DynamicProbeManager; print(DynamicProbeManager('demo'))"
WATCH = ["-m", "probemon", "watch", "demo", "--plain", "--max-new-tokens", "2"]
COMPILES = (
    "import numpy as np; from probemon.engine.kernels.numba_cached import n_compiled\n"
    "from probemon.engine.kernels.numba_inputs import far_few\n"
    "x = np.ones((2, 5), np.float32); x[1] = 2\n"
    "print(far_few(x, np.zeros(5), np.empty((0, 5), np.float32), 6.0), n_compiled())\n"
)


def works(*command):
    """Whether a command is here and does what it is to do, such as changing the user."""
    return shutil.which(command[0]) is not None and subprocess.run(command, capture_output=True).returncode == 0


needs_users = pytest.mark.skipif(not works(*AS, f"--reuid={NOBODY}", "true"), reason="only root becomes another user")
needs_mounts = pytest.mark.skipif(not works("unshare", "-m", "bash", "-c", READ_ONLY), reason="nothing may be mounted")


def start(*arguments, before=(), **environment):
    """Run Python without a home; return its status, output and errors."""
    given = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [*before, "env", "-i", *(f"{k}={v}" for k, v in (given | environment).items()), sys.executable]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def place():
    """A folder that others can reach, as pytest's cannot be."""
    folder = Path(tempfile.mkdtemp(prefix="probemon-tests-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def at_home(place):
    """Gives a user a temporary folder, in which code that this process has kept spares compiling it again."""
    from numba.core.caching import UserProvidedCacheLocator

    bundled.bundled_path()
    ours = Path(cache_folder("numba"))

    def at_home(user):
        folder = place / str(user)
        kept_code = folder / f"probemon-{user}" / "numba"
        kept_code /= UserProvidedCacheLocator.get_suitable_cache_subpath(str(ROOT / "probemon/engine/kernels/x.py"))
        kept_code.mkdir(parents=True)
        for file in [file for suffix in ("nbi", "nbc") for file in ours.glob(f"*.{suffix}")]:
            shutil.copy(file, kept_code)
        for path in [folder, *folder.rglob("*")]:
            os.chown(path, user, user)
            path.chmod(0o700)
        return folder

    return at_home


# -- as another user, who has nothing but a temporary folder ---------------------------------------------------------


@needs_users
@pytest.mark.parametrize(
    ("user", "arguments", "says"),
    [
        (NAMELESS, ["-c", MANAGER], "DynamicProbeManager('wordnet-smollm2-135m', 479 probes"),
        (NOBODY, WATCH, "43 tokens (2 generated)"),
    ],
    ids=["manager", "watch"],
)
def test_start_without_a_home_works_and_names_the_folder_used(at_home, user, arguments, says):
    folder = at_home(user)
    before = ["env", "-C", str(folder), *AS, f"--reuid={user}", f"--regid={user}"]
    # The demo lies in a cache of root's, which can be read and not written.
    environment = {"TMPDIR": folder, "XDG_CACHE_HOME": cache_dir().parent}
    status, out, errors = start(*arguments, before=before, **environment)
    assert status == 0 and says in out, errors
    assert errors.count("\n") == 1 and errors.startswith(f"the cache folder cannot be written ({cache_dir()}: ")
    assert f"{folder}/probemon-{user} is used instead; set XDG_CACHE_HOME to a folder that can" in errors
    assert not (folder / "~").exists()  # libraries that know no home make it in the current folder


# -- a file system that is read-only, or full ------------------------------------------------------------------------


@needs_mounts
def test_read_only_file_system_with_a_temporary_folder_works(at_home):
    folder = at_home(0)
    prepare = f"cp -a {folder} {folder}.kept && mount -t tmpfs none {folder} && cp -a {folder}.kept/. {folder}"
    before = ["unshare", "-m", "bash", "-c", f'{prepare} && {READ_ONLY} && exec "$@"', "-"]
    status, out, errors = start("-c", MANAGER, before=before, TMPDIR=folder, XDG_CACHE_HOME=cache_dir().parent)
    assert status == 0 and "479 probes" in out, errors
    assert errors.count("\n") == 1 and f"Read-only file system): {folder}/probemon-0 is used instead" in errors


@needs_mounts
@pytest.mark.parametrize(
    "arguments", [["-c", MANAGER], ["-m", "probemon", "doctor", "demo"]], ids=["manager", "doctor"]
)
def test_nothing_writable_gives_one_line_that_names_the_variable(arguments):
    before = ["unshare", "-m", "bash", "-c", f'{READ_ONLY} && exec "$@"', "-"]
    status, out, errors = start(*arguments, before=before)
    last = errors.splitlines()[-1]
    assert status in (1, 2) and out == "" and last.endswith("set TMPDIR to a folder that can be written"), errors
    assert last.startswith(("probemon: no temporary", "probemon.errors.ConfigError: no temporary"))


def test_full_disk_compiles_without_keeping_the_code(tmp_path):
    limited = ["bash", "-c", 'ulimit -f 8; exec "$@"', "-"]  # files of 8 KB: the folder seems usable
    # Python itself would leave half of its own .pyc files.
    environment = {"NUMBA_CACHE_DIR": tmp_path, "PYTHONDONTWRITEBYTECODE": "1"}
    status, out, errors = start("-c", COMPILES, before=limited, **environment)
    assert (status, out) == (0, "[0 1] 1\n"), errors
    assert errors.count("\n") == 1 and f"compiled code cannot be kept in {tmp_path}" in errors
    assert "(File too large): set XDG_CACHE_HOME" in errors and "every start compiles again" in errors


def test_kept_code_is_compiled_once_and_again_when_damaged(tmp_path):
    assert start("-c", COMPILES, NUMBA_CACHE_DIR=tmp_path) == (0, "[0 1] 1\n", "")
    assert start("-c", COMPILES, NUMBA_CACHE_DIR=tmp_path) == (0, "[0 1] 0\n", "")
    for index in tmp_path.rglob("*.nbi"):
        index.write_bytes(index.read_bytes()[:10])
    assert start("-c", COMPILES, NUMBA_CACHE_DIR=tmp_path) == (0, "[0 1] 1\n", "")


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), SafetensorError("I/O error")])
def test_unwritable_demo_names_the_variable_to_set(monkeypatch, tmp_path, error):
    def full(source, folder):
        raise error

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(bundled, "_convert", full)
    with pytest.raises(ConfigError, match=r"cannot be written to .*: make room for 0.5 GB, or set XDG_CACHE_HOME to"):
        bundled.load_bundled()


def test_unwritable_hub_cache_names_the_variable_to_set(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    failure = OSError(errno.EROFS, "Read-only file system", str(tmp_path))

    def fail(*args, **kwargs):
        raise RuntimeError("what a library says") from failure

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(PackError, match=r"'org/pack' cannot be fetched: .*Read-only file system\): set HF_HOME to"):
        ProbePack.from_pretrained("org/pack")
    monkeypatch.setattr("probemon.host.loading._hub_answers", lambda name: True)
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", fail)
    with pytest.raises(ConfigError, match=r"'org/model' cannot be fetched: .*Read-only file system\): set HF_HOME to"):
        load_model("org/model", "cpu", print)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", "~/.cache/huggingface/hub")
    for fetch in (ProbePack.from_pretrained, lambda name: load_model(name, "cpu", print)):
        with pytest.raises(ConfigError, match="there is no home folder for what is fetched from the hub: set HF_HOME"):
            fetch("org/name")


# -- which temporary folder ------------------------------------------------------------------------------------------


@pytest.fixture
def elsewhere(monkeypatch, tmp_path, caplog):
    """Where nothing can be written but the temporary folder that it is; `said()` is what is logged since."""
    (tmp_path / "file").touch()
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    cache_folders._temporary.cache_clear()
    yield tmp_path / "tmp"
    cache_folders._temporary.cache_clear()


def test_next_start_uses_the_same_private_folder_and_warns_once(elsewhere, caplog):
    with caplog.at_level(logging.WARNING, "probemon"):
        folder = cache_dir()
        assert cache_dir() == folder and kept("states") == folder / "states"
        assert len(caplog.records) == 1 and str(folder) in caplog.text and "Not a directory" in caplog.text
        cache_folders._temporary.cache_clear()  # as in another process
        assert cache_dir() == folder and len(caplog.records) == 2
    assert folder == elsewhere / f"probemon-{os.geteuid()}" and folder.stat().st_mode & 0o777 == 0o700


def test_tilde_in_the_variable_means_the_home_folder(monkeypatch, tmp_path):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", "~/x")
    assert cache_dir() == tmp_path / "home/x/probemon" and not list((tmp_path / "here").iterdir())


def linked(folder):
    (folder.parent / "theirs").mkdir()
    folder.symlink_to(folder.parent / "theirs")


def of_another_user(folder):
    folder.mkdir(mode=0o700)
    try:
        os.chown(folder, NOBODY, NOBODY)
    except PermissionError:
        pytest.skip("only root gives a folder away")


def written_by_all(folder):
    folder.mkdir()
    folder.chmod(0o777)


@pytest.mark.parametrize("squat", [linked, of_another_user, written_by_all, Path.touch])
def test_folder_that_another_user_could_have_prepared_is_not_used(elsewhere, squat):
    squat(elsewhere / f"probemon-{os.geteuid()}")
    folder = cache_dir()
    assert folder.parent == elsewhere and folder.name.startswith("probemon-") and cache_dir() == folder
    assert folder.name != f"probemon-{os.geteuid()}" and folder.stat().st_mode & 0o777 == 0o700


def test_no_usable_folder_names_the_variable_to_set(elsewhere, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(elsewhere.parent / "file"))
    with pytest.raises(
        ConfigError, match=r"no cache folder can be written .*: set XDG_CACHE_HOME to a folder that can"
    ):
        cache_dir()


def test_kept_files_are_read_from_a_read_only_folder(elsewhere, monkeypatch):
    monkeypatch.setattr(cache_folders, "why_not_usable", lambda folder: "read-only")
    monkeypatch.setenv("XDG_CACHE_HOME", str(elsewhere))
    (elsewhere / "probemon").mkdir()
    (elsewhere / "probemon" / "model").touch()
    assert kept("model") == elsewhere / "probemon" / "model"


def test_unwritable_inductor_folder_is_named(elsewhere, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(elsewhere.parent / "file"))
    with pytest.raises(ConfigError, match=r"TORCHINDUCTOR_CACHE_DIR cannot be written .*File exists"):
        cache_folders.check_import_folders()


def test_triton_uses_our_folder_when_its_own_is_unwritable(elsewhere, monkeypatch):
    knobs = pytest.importorskip("triton").knobs
    monkeypatch.setattr(knobs.runtime, "interpret", False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(elsewhere))
    cache_folders.give_triton_a_folder()
    assert knobs.cache.dir == str(elsewhere)
    monkeypatch.setenv("TRITON_CACHE_DIR", "~/.triton/cache")  # as it is named without a home
    cache_folders.give_triton_a_folder()
    assert knobs.cache.dir == str(cache_dir() / "triton") and not Path("~").exists()
