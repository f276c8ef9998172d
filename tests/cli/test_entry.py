"""Every command line has a version, help, completion, and errors that suggest what was meant."""

import errno
import json
import os
import resource
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
import torch
import typer
from safetensors.torch import save_file

import probemon
from arrangements import tokenizer
from conftest import make_model, make_pack
from probemon.cli import app as cli
from probemon.cli import shell_words
from probemon.errors import ConfigError
from probemon.host.loading import load_model
from probemon.util.files import save_tensors, write_text_atomically
from probemon.util.first_sentence import first_sentence

ROOT = Path(__file__).parents[2]
COMMANDS = typer.main.get_command(cli.app)


def paths_of(command, path=()):
    """Every command and group, as the words that call it."""
    yield path
    for name, below in getattr(command, "commands", {}).items():
        yield from paths_of(below, (*path, name))


def run(monkeypatch, capsys, *arguments):
    """Exit status, standard output and standard error of a command."""
    monkeypatch.setattr(sys, "argv", ["probemon", *arguments])
    monkeypatch.setattr(cli, "app", COMMANDS)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return (ended.value.code, *capsys.readouterr())


def test_version_is_that_of_the_package(monkeypatch, capsys):
    assert probemon.__version__ == "0.1.0"
    assert run(monkeypatch, capsys, "--version") == (0, "probemon 0.1.0\n", "")
    assert "version: 0.1.0\n" in (ROOT / "CITATION.cff").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["dynamic"] == ["version"] and project["authors"] == [{"name": "The probemon authors"}]


def test_list_of_commands_begins_with_watch_and_truncates_no_line(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = run(monkeypatch, capsys, "--help")
    listed = out.split("Commands:\n")[1]
    assert code == 0 and listed.split()[0] == "watch" and "..." not in listed


@pytest.mark.parametrize("path", [*paths_of(COMMANDS)], ids=" ".join)
def test_h_and_help_print_the_same(monkeypatch, capsys, path):
    short, long = (run(monkeypatch, capsys, *path, name) for name in ("-h", "--help"))
    assert short == long and short[0] == 0 and short[2] == ""
    assert short[1].startswith(f"Usage: {' '.join(('probemon', *path))} [OPTIONS]") and "-h, --help" in short[1]


@pytest.mark.parametrize("path", [(), ("pack",), ("import",)])
def test_command_without_arguments_prints_the_help(monkeypatch, capsys, path):
    asked_for = run(monkeypatch, capsys, *path, "--help")
    code, out, error = run(monkeypatch, capsys, *path)
    assert (code, out.rstrip(), error) == (0, asked_for[1].rstrip(), "")


def test_package_runs_as_a_module():
    done = subprocess.run([sys.executable, "-m", "probemon", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "probemon 0.1.0\n", "")


@pytest.mark.parametrize("line", [["inspect", "demo"], ["watch", "demo"], ["pack", "show"]], ids=" ".join)
def test_deleted_current_folder_is_one_line(tmp_path, line):
    gone = tmp_path / "gone"
    gone.mkdir()
    done = subprocess.run(
        ["sh", "-c", 'rmdir "$PWD" && exec "$@"', "sh", sys.executable, "-m", "probemon", *line],
        cwd=gone, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("probemon: the current folder does not exist any more")


@pytest.mark.parametrize("line", [b"train demo rows.jsonl --out p\xe9", b"inspect p\xe9", b"p\xe9"])
def test_argument_that_is_not_utf_8_is_refused(monkeypatch, capsys, line):
    code, out, error = run(monkeypatch, capsys, *map(os.fsdecode, line.split()))
    assert (code, out) == (2, "")
    assert error == "probemon: the argument 'p\\xe9' is not UTF-8: write it in UTF-8, or rename its file\n"


@pytest.mark.parametrize("module", ["typer", "probemon.cli.watch.command", "torch", "transformers"])
def test_ctrl_c_during_imports_ends_silently(module):
    program = f"""
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # of a job in the background it is ignored
class Interrupting:
    def find_spec(self, name, *_):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupting())
sys.argv = ["probemon", "watch", "demo", "--max-new-tokens", "1"]
from probemon.cli import main
main()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize(
    ("words", "number", "completed"),
    [
        ("probemon wa", 1, "watch"),
        ("probemon pack su", 2, "subset"),
        ("probemon watch demo --max", 3, "--max-new-tokens"),
    ],
)
def test_shell_completes_commands_and_options(words, number, completed):
    asked = {"_PROBEMON_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(number)}
    done = subprocess.run(
        [sys.executable, "-m", "probemon"], capture_output=True, text=True, env={**os.environ, **asked}
    )
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, [completed], "")


# -- models ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "the name of the model is empty: give a folder, a name on the hub, or demo"),
        ("models/whale", "no such folder: 'models/whale'; did you mean 'models/whales'?"),
        ("./whales", "no such folder: './whales'; give a folder, or a name on the hub"),
        ("models/whales/config.json", "models/whales/config.json is a file: give the folder of a model"),
    ],
)
def test_wrong_model_names_similar_ones(monkeypatch, tmp_path, name, message):
    (tmp_path / "models" / "whales").mkdir(parents=True)
    (tmp_path / "models" / "whales" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        load_model(name, "cpu", print)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("line", "order"),
    [
        ("watch {pack} demo --plain", True),
        ("watch {pack}", True),
        ("watch {pack} nowhere", True),
        ("serve {pack} demo", True),
        ("doctor {pack} demo", True),
        ("analyze {pack} demo rows.jsonl --out scores", True),
        ("analyze {pack} demo rows.jsonl --out scores --ray 2", True),
        ("train {pack} rows.jsonl --exclusive --out new", False),
        ("states {pack} rows.jsonl --sites resid_post.1 --out new", False),
        ("calibrate demo --model {pack} --benign rows.jsonl --fpr 0.1", False),
        ("routing {pack}", False),
    ],
)
@pytest.mark.parametrize("pack", [str(ROOT / "probes" / "wordnet-smollm2-135m"), "wordnet-smollm2-135m"])
def test_pack_in_place_of_a_model_is_named_as_a_pack(monkeypatch, capsys, tmp_path, line, order, pack):
    monkeypatch.chdir(tmp_path)
    rows = [
        {"text": f"Text {i} of {word}.", "labels": ["a"] * (i % 2)} for i in range(40) for word in ("whales", "ships")
    ]
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    code, out, error = run(monkeypatch, capsys, *line.format(pack=pack).split())
    remedy = (
        "give the model first, then the pack" if order else "give the folder of a model, a name on the hub, or demo"
    )
    assert (code, out) == (2, "")
    assert error.splitlines()[-1] == f"probemon: {pack} is a probe pack, not a model: {remedy}"


def test_folder_without_a_tokenizer_is_refused_in_a_whole_sentence(tmp_path):
    make_model().save_pretrained(tmp_path / "bare")
    with pytest.raises(ConfigError, match="is a folder and cannot be loaded: ") as caught:
        load_model(str(tmp_path / "bare"), "cpu", print)
    assert "\n" not in str(caught.value) and not str(caught.value).endswith((":", ",", "("))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "No tokenizer from one of: \n(1) a file, \n(2) a class. \nInstall it.",
            "No tokenizer from one of: (1) a file, (2) a class",
        ),
        ("It failed. Try again.\nA trace", "It failed. Try again"),
        ("\n  Nothing of:", "Nothing of"),
        ("", "OSError"),
        ("a" * 400, "a" * 299 + "…"),
    ],
)
def test_library_error_is_not_cut_off_at_a_colon(text, sentence):
    assert first_sentence(OSError(text)) == sentence


def test_model_that_cannot_be_fetched_gets_a_remedy(monkeypatch):
    with pytest.raises(ConfigError) as caught:  # the tests run offline
        load_model("org/nope", "cpu", print)
    assert str(caught.value) == (
        "'org/nope' is neither a folder nor a model in the cache, and HF_HUB_OFFLINE forbids to ask the hub: unset it,"
        " or give a folder"
    )


def test_unreachable_hub_is_asked_once():
    """huggingface_hub alone asks it for 48 seconds."""
    closed = {**os.environ, "HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9"}
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "probemon", "watch", "dmo", "demo"], capture_output=True, text=True, env=closed
    )
    assert time.monotonic() - begin < 20
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
    assert "'dmo' is neither a folder nor a model" in done.stderr and "did you mean 'demo'?" in done.stderr


@pytest.mark.parametrize(
    ("line", "end"),
    [
        ("find whale", "No such command 'find': did you mean 'probemon concepts'?"),
        ("compare a b", "No such command 'compare': did you mean 'probemon diff'?"),
        ("evaluate demo", "No such command 'evaluate': did you mean 'probemon analyze'?"),
        ("pack find", "No such command 'find'. (see probemon pack --help)"),
        ("quantize demo --out small", "OUT is the second argument: probemon quantize PACK OUT"),
        ("inspect demo --out small", "(see probemon inspect --help)"),
        ("quantize demo probes", "probes exists: choose another path, or overwrite it (--overwrite)"),
        (
            "import probelab w.safetensors new --site resid_post.1 --normalize none",
            "w.safetensors is tensors of safetensors: probemon import steerkit reads its own, probemon import"
            " safetensors any, with a mapping",
        ),
        ("train demo one.jsonl --exclusive --out new", "let the model write more (--generate N)"),
    ],
)
def test_suggestion_for_a_mistyped_command_is_a_shell_command(monkeypatch, capsys, tmp_path, line, end):
    monkeypatch.chdir(tmp_path)
    save_file({"w": torch.zeros(3)}, "w.safetensors")
    Path("probes").mkdir()
    Path("one.jsonl").write_text(
        "".join(f'{{"text": "Text {i}.", "labels": {["a"] * (i == 1)}}}\n' for i in range(9)).replace("'", '"')
    )
    if line.startswith("train"):
        monkeypatch.setattr("probemon.lab.cli.train.load_aloud", lambda *_, **__: (make_model(), tokenizer()))
    code, out, error = run(monkeypatch, capsys, *line.split())
    assert (code, out, error.count("\n")) == (2, "", 1) and error.endswith(f"{end}\n")


@pytest.mark.parametrize("command", sorted(set(shell_words._COMMANDS.values())))
def test_suggested_commands_exist(command):
    assert command in COMMANDS.commands and not set(shell_words._COMMANDS) & set(COMMANDS.commands)


def test_every_command_opens_a_model_with_the_same_defaults():
    """Scores of one command are those of another only where both read the model in one number format."""
    below = [*COMMANDS.commands.values()]
    below += [inner for group in below for inner in getattr(group, "commands", {}).values()]
    params = [param for command in below for param in command.params]
    for name, default in [("dtype", "auto"), ("device", "cpu"), ("strict", False)]:
        defaults = [param.default for param in params if param.name == name]
        assert len(defaults) > 1 and set(defaults) == {default}, name


# -- packs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ("watch", "demo"),
        ("inspect",),
        ("quantize",),
        ("hierarchy",),
        ("calibrate", "--benign", "README.md", "--fpr", "0.1"),
        ("pack", "push"),
    ],
    ids=" ".join,
)
def test_mistyped_pack_names_the_nearest_in_every_command(monkeypatch, capsys, arguments):
    more = {"quantize": ["out"], "hierarchy": ["tree.json"], "pack": ["org/name"]}.get(arguments[0], [])
    monkeypatch.chdir(ROOT)
    code, out, error = run(monkeypatch, capsys, *arguments, "probes/wordnet-smollm", *more)
    near = " or ".join(
        f"'probes/{name}-smollm2-135m{end}'" for name, end in (("wordnet", ""), ("wordnet", "-mlp"), ("concepts", ""))
    )
    assert (code, out) == (2, "")
    assert error == f"probemon: no such folder: 'probes/wordnet-smollm'; did you mean {near}?\n"


@pytest.mark.parametrize("name", ["demo", "wordnet-smollm2-135m"])
def test_shipped_pack_is_found_from_any_folder(monkeypatch, capsys, tmp_path, name):
    monkeypatch.chdir(tmp_path)
    code, out, error = run(monkeypatch, capsys, "inspect", name, "--json")
    assert (code, error) == (0, "") and json.loads(out)["name"] == "wordnet-smollm2-135m"


@pytest.mark.parametrize(("n", "probes"), [(1, "1 probe,"), (2, "2 probes,")])
def test_singular_and_licence_are_printed_correctly(monkeypatch, capsys, tmp_path, n, probes):
    make_pack(tmp_path / "few", make_model(), n=n, licence="not stated")
    code, out, error = run(monkeypatch, capsys, "inspect", str(tmp_path / "few"))
    assert (code, error) == (0, "") and f"random  {probes} " in out
    assert "read at resid_post.1; licence: not stated\n" in out
    code, out, _ = run(monkeypatch, capsys, "concepts", str(tmp_path / "few"))
    assert code == 0 and f"{n} of {n} concept{'s' * (n > 1)}," in out


def test_dangling_link_is_not_called_a_missing_file(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("tree.json").symlink_to("gone.json")
    code, _, error = run(monkeypatch, capsys, "hierarchy", "demo", "tree.json", "--out", "new")
    assert code == 2
    assert error == "probemon: tree.json is a link that leads nowhere: mend it, or give the file itself\n"


def test_quantize_accepts_the_option_its_error_advises(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, capsys, "quantize", "demo", "small")[0] == 0
    before = Path("small/manifest.json").stat().st_ino
    code, _, error = run(monkeypatch, capsys, "quantize", "demo", "small")
    assert code == 2 and "--overwrite" in error and Path("small/manifest.json").stat().st_ino == before
    assert run(monkeypatch, capsys, "quantize", "demo", "small", "--overwrite")[0] == 0
    assert Path("small/manifest.json").stat().st_ino != before


# -- what is wrong is said before a model is loaded ---------------------------------------------------


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("analyze nowhere probes demo.jsonl --out new", "no such folder: 'probes'"),
        ("analyze nowhere demo missing.jsonl --out new", "missing.jsonl is neither a file nor a folder"),
        ("analyze nowhere demo empty.txt --out new", "empty.txt has no documents: there is nothing to score\n"),
        ("analyze nowhere demo a.yaml --out new", "a.yaml is YAML, and each line is a document: write its"),
        ("analyze nowhere demo a.pt --out new", "a.pt is a file of tensors, and no text: write its texts as .txt or "),
        ("analyze nowhere demo demo.jsonl --out new --floor 2", "floor is 2.0"),
        ("analyze nowhere demo demo.jsonl --out demo.jsonl", "demo.jsonl exists and has no analysis"),
        ("analyze nowhere demo demo.jsonl --out full", "full exists and has no analysis"),
        ("analyze nowhere demo full --out full/new", "full/new is in full"),
        ("analyze nowhere demo demo.jsonl --out new --audit-rate 2", "audit_rate is 2.0"),
        ("analyze nowhere demo demo.jsonl --out new --alert-set x", "no set of alert thresholds 'x'"),
        ("analyze nowhere demo missing.jsonl --out new --ray 2", "missing.jsonl is neither a file nor a folder"),
        ("calibrate demo --model nowhere --benign missing.jsonl --fpr 0.1", "missing.jsonl is neither"),
        ("calibrate demo --model nowhere --benign demo.jsonl --fpr 0.1 --watch whael", "did you mean 'whale'?"),
        ("calibrate demo --model nowhere --benign demo.jsonl --fpr 0.1 --positive named.jsonl", "no concept 'nohting'"),
        ("calibrate demo --model nowhere --benign demo.jsonl --fpr 0.1 --out full", "full exists"),
        ("calibrate demo --model nowhere --benign demo.jsonl --fpr 0.1 --text-field body", "no field 'body'"),
        ("watch nowhere demo --alert-set x", "no set of alert thresholds 'x'"),
        ("routing nowhere --bem full", "full has no bem.json"),
        ("routing nowhere --window 0", "window is 0"),
        ("routing nowhere --out missing/x.jsonl", "missing is not a folder"),
        ("report missing", "no such folder: 'missing'; `probemon analyze` writes one"),
        ("report demo.jsonl", "demo.jsonl is a file: give the folder"),
        ("hierarchy demo missing.json", "no such file: 'missing.json'"),
        ("report scored", "no such folder: 'scored'; did you mean 'scores'?"),
    ],
)
def test_inputs_are_checked_before_a_model_is_loaded(monkeypatch, capsys, tmp_path, line, words):
    """Each of these names a model that is not there, too; its absence would be said if it were looked for first."""
    monkeypatch.chdir(tmp_path)
    Path("demo.jsonl").write_text('{"text": "Whales swim."}\n')
    Path("empty.txt").write_text("\n \n")
    for name in ("a.yaml", "a.pt"):
        Path(name).write_text("- whales\n- ships\n")
    Path("named.jsonl").write_text('{"text": "Whales swim.", "concepts": ["nohting"]}\n')
    for file in ("full/something", "scores/documents.parquet"):
        Path(file).parent.mkdir()
        Path(file).touch()
    before = sorted(tmp_path.rglob("*"))
    code, out, error = run(monkeypatch, capsys, *line.split())
    assert (code, out) == (2, "") and words in error and error.count("\n") == 1 and "'nowhere'" not in error
    assert sorted(tmp_path.rglob("*")) == before


def test_slow_steps_are_announced_in_a_terminal_only():
    program = (
        "import time; from probemon.cli.common import told_if_long\n"
        "with told_if_long('at once', 60): pass\n"
        "with told_if_long('never so', 0.1, lambda: False): time.sleep(0.8)\n"
        "begin = time.monotonic()\n"
        "with told_if_long('compiling', 0.1, lambda: time.monotonic() > begin + 0.3): time.sleep(1.5)\n"
    )
    ours, theirs = os.openpty()
    in_terminal = subprocess.Popen([sys.executable, "-c", program], stderr=theirs)
    os.close(theirs)
    assert os.read(ours, 1000) == b"compiling\r\n" and in_terminal.wait() == 0
    os.close(ours)
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stderr == b""


def _caused(error, cause):
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MemoryError(), "memory ran out"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), "memory ran out"),
        (torch.OutOfMemoryError("CUDA out of memory"), "memory ran out"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "memory ran out"),
        (OSError(errno.ENOSPC, "No space left on device"), "a file cannot be read or written: No space left on device"),
        (OSError(errno.ENOSPC, "No space left on device", "new/a"), "new/a cannot be used: No space left on device"),
        (
            _caused(RuntimeError("while writing"), OSError(errno.EROFS, "Read-only file system", "x")),
            "x cannot be used",
        ),
    ],
)
def test_out_of_memory_is_one_line_without_a_traceback(monkeypatch, capsys, error, said):
    def command(**_):
        raise error

    monkeypatch.setattr(sys, "argv", ["probemon", "inspect", "pack"])
    monkeypatch.setattr(cli, "app", command)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    shown = capsys.readouterr().err
    assert ended.value.code == 2 and shown.startswith(f"probemon: {said}") and shown.count("\n") == 1


def test_full_disk_is_an_os_error_that_names_the_file(tmp_path):
    """safetensors has errors of its own for it."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.raises(OSError, match=r"File too large: '.*a\.safetensors'"):
            save_tensors(tmp_path / "a.safetensors", {"a": torch.zeros(1000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_device_or_pipe_is_not_replaced_by_a_file(tmp_path):
    """As /dev/null would be, for whoever has all rights, by `--out /dev/null --overwrite`."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "null").symlink_to("/dev/null")
    for name in ("pipe", "null"):
        with pytest.raises(OSError, match="It is a device or a pipe"):
            write_text_atomically(tmp_path / name, "text")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["null", "pipe"]
    assert (tmp_path / "pipe").is_fifo() and (tmp_path / "null").is_symlink()
    (tmp_path / "a").write_text("before")
    write_text_atomically(tmp_path / "a", "text")
    assert (tmp_path / "a").read_text() == "text"
