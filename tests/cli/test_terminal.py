"""No text from outside can control the terminal, through any command, option or part of a pack."""

import ast
import io
import json
import os
import re
import shutil
import subprocess
import sys
import unicodedata
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from rich.table import Table
from rich.text import Text
from safetensors.torch import load_file, save_file

import hatcat_packs
import probemon
from conftest import EOS, HIDDEN, make_model, make_pack
from probemon import ProbePack
from probemon.adapters.cli.routing_view import LiveRouting
from probemon.cli import app as cli
from probemon.cli.terminal import Bordered, answer, border, harmless, say, terminal
from probemon.cli.watch.live_view import LiveView
from probemon.lab.calibration.calibrated_pack import write_calibrated
from probemon.lab.calibration.expansion import Expansion
from probemon.util.files import sha256

BIDI = set("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
ESCAPES = "\x1b]0;pwned\x07\x1b[2J\x9b31m\r\b\x7f"
MARKUP = (  # what names may have: no control characters, no overrides of the writing direction
    "[red]x[/nonsense]:skull:\u2028"
)
COMMANDS = typer.main.get_command(cli.app)  # made once: it takes longer than most commands
HOSTILE = f"{ESCAPES}{MARKUP}\u202egnp\u2066\n\ud800"


def harmful(text, keep="\n"):
    """Characters that a terminal would obey, by their Unicode categories: controls, halves of pairs, separators of
    lines, and those of direction."""
    return [c for c in text if c not in keep and (unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") or c in BIDI)]


def run(monkeypatch, capsys, *arguments):
    """Exit status, standard output and standard error of a command, of which no text is harmful."""
    monkeypatch.setattr(sys, "argv", ["probemon", *map(str, arguments)])
    monkeypatch.setattr(cli, "app", COMMANDS)
    with pytest.raises(SystemExit) as ended, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cli.main()
    out, error = capsys.readouterr()
    assert not harmful(out) and not harmful(error), (arguments, out, error)
    assert "Traceback" not in error, error
    return ended.value.code, out, error


# -- the border itself ---------------------------------------------------------------------------


@settings(max_examples=120, deadline=None)
@given(st.text(st.characters(codec=None) | st.sampled_from(HOSTILE)))
def test_harmless_text_has_no_control_codes_and_loses_nothing_else(text):
    shown = harmless(text)
    assert not harmful(shown, keep="") and harmless(shown) == shown
    assert harmless(text, keep="\n").replace("\n", r"\n") == shown
    if not harmful(text, keep="") and not re.search(
        "[\xad\u180e\u200b-\u206f\ufeff\ufff0-\ufffb\U000e0000-\U000e0fff]", text
    ):
        assert shown == text
    shown.encode("utf-8")


def test_scripts_and_emoji_that_need_joiners_are_unchanged():
    for text in ("naïve café", "میخواهم\u200c", "👩\u200d👩\u200d👧", "क्\u200dष", "日本語", "שלום", "é\u0301"):
        assert harmless(text) == text


@pytest.mark.parametrize("width", [40, 200])
def test_console_treats_no_text_as_markup_or_escapes(capsys, width):
    console = terminal(width=width, soft_wrap=False, force_terminal=True, color_system="standard")
    table = Table(title=HOSTILE)
    table.add_column(HOSTILE)
    table.add_row(HOSTILE)
    table.add_row(Text(HOSTILE, style="red"))
    for thing in (HOSTILE, Text(HOSTILE), table):
        console.print(thing)
    shown = re.sub("\x1b\\[[0-9;]*m", "", capsys.readouterr().out)  # rich's own colours
    assert (
        not harmful(shown)
        and "[red]" in shown
        and "[/nonsense]" in "".join(shown.split()).replace("│", "")
        and ":skull:" in "".join(shown.split())
    )


def test_border_covers_prints_warnings_and_tracebacks_and_is_removed(capsys):
    before = sys.stdout, sys.stderr
    with border():
        print(HOSTILE)
        print(HOSTILE, file=sys.stderr)
        sys.stderr.write(f"a\tb\r{HOSTILE}")
        say("one\ntwo", "three", error=True)
    assert (sys.stdout, sys.stderr) == before
    out, error = capsys.readouterr()
    assert not harmful(out) and not harmful(error, keep="\n\t") and out.count("\n") == 2
    assert error.endswith("one\\ntwo\nthree\n") and "a\tb\\r" in error


def test_characters_that_a_stream_cannot_encode_are_escaped():
    raw = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    Bordered(raw).write("é\x1b\n")
    raw.flush()
    assert raw.buffer.getvalue() == b"\\xe9\\x1b\n"


def test_json_output_has_the_same_content(capsys):
    content = {"name": HOSTILE, "list": [1, 2.5, None, True, {"é": "日本"}]}
    answer(content)
    answer({"a": float("nan"), "b": [float("inf"), {"c": (1.5, float("-inf"))}]})
    first, second = capsys.readouterr().out.splitlines()
    assert (
        first.isascii()
        and json.loads(first) == content
        and json.loads(second, parse_constant=lambda _: 1 / 0) == {"a": None, "b": [None, {"c": [1.5, None]}]}
    )


def test_only_the_terminal_module_prints():
    """Nobody else prints, makes a console, or reads markup."""
    for path in Path(probemon.__file__).parent.rglob("*.py"):
        if path.name == "terminal.py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                name = (
                    node.func.id
                    if isinstance(node.func, ast.Name)
                    else node.func.attr
                    if isinstance(node.func, ast.Attribute)
                    else ""
                )
                assert name not in ("echo", "secho", "from_markup", "from_ansi", "Console"), f"{path}:{node.lineno}"
                assert not (isinstance(node.func, ast.Name) and name == "print"), f"{path}:{node.lineno}"
                assert not (name == "write" and "std" in ast.unparse(node.func)), f"{path}:{node.lineno}"
            assert not (isinstance(node, (ast.Import, ast.ImportFrom)) and "rich.markup" in ast.unparse(node)), (
                f"{path}:{node.lineno}"
            )


# -- every command and option --------------------------------------------------------------------


def commands(command, path=()):
    """Every command below one, with its words."""
    if hasattr(command, "commands"):
        for name, below in command.commands.items():
            yield from commands(below, (*path, name))
    else:
        yield path, command


ALL = list(commands(COMMANDS))


@pytest.mark.parametrize("path, command", ALL, ids=[" ".join(path) for path, _ in ALL])
def test_hostile_arguments_of_every_command_and_option_are_escaped(monkeypatch, capsys, tmp_path, path, command):
    monkeypatch.chdir(tmp_path)
    text = HOSTILE[:-1].replace("\n", "")
    required = [param for param in command.params if param.required]
    given = [
        word
        for param in required
        for word in ([text] if param.param_type_name == "argument" else [param.opts[0], text])
    ]
    for more in ("", "\ud800") if given else ():
        code, _, error = run(monkeypatch, capsys, *path, *(f"{word}{more}" for word in given))
        assert code == 2 and error.count("\n") == 1
    for param in command.params:
        if param.param_type_name == "option" and not param.required and not param.is_flag and param.name != "help":
            code, _, error = run(monkeypatch, capsys, *path, *given, param.opts[0], text)
            assert code == 2 and error.count("\n") == 1, param.name
    assert run(monkeypatch, capsys, *path, f"--{text}")[0] == 2 and os.listdir(tmp_path) == []
    assert run(monkeypatch, capsys, *path[:-1], text)[0] == 2


# -- packs ---------------------------------------------------------------------------------------


def forged(source, target, manifest=lambda manifest: None, tensors=lambda tensors: None):
    """A copy of a pack with its manifest or its tensors changed, and hashes that are right."""
    shutil.copytree(source.directory, target)
    held = load_file(target / "probes.safetensors")
    if tensors(held) is not False:
        save_file(held, target / "probes.safetensors")
    content = json.loads((target / "manifest.json").read_text())
    for file in content["files"]:
        content["files"][file] = {"sha256": sha256(target / file), "size": (target / file).stat().st_size}
    manifest(content)
    (target / "manifest.json").write_text(json.dumps(content))
    return target


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    """A folder with a tiny model whose tokens are hostile."""
    from tokenizers import Tokenizer, models
    from tokenizers.decoders import Fuse
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("host") / "model"
    words = {f"{HOSTILE[:-1]}{i}": i for i in range(EOS + 1, 61)} | {f"<{i}>": i for i in range(EOS + 1)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<0>")), eos_token=f"<{EOS}>", pad_token="<0>"
    )
    tokenizer.backend_tokenizer.decoder = Fuse()
    make_model().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def hostile_pack(tmp_path_factory):
    """A pack whose every text is as hostile as the format lets it be."""
    folder = tmp_path_factory.mktemp("packs")
    concepts = [
        {
            "id": f"{MARKUP}{i}",
            "name": f"{MARKUP} {i % 5}",
            "parents": [f"{MARKUP}{(i - 1) // 3}"] if i else [],
            "definition": HOSTILE[:-1],
        }
        for i in range(12)
    ]
    made = make_pack(
        folder / "made",
        make_model(),
        n=12,
        name=MARKUP,
        concepts=concepts,
        licence=HOSTILE[:-1],
        alert_threshold=torch.full((12,), 0.05),
        card=f"# {HOSTILE[:-1]}\n",
    )

    def manifest(content):
        content["host"] |= {"model_id": HOSTILE[:-1], "fingerprint": HOSTILE[:-1], "revision": HOSTILE[:-1]}
        content["quality"] = {
            "auroc_median": 0.5,
            HOSTILE[:-1]: HOSTILE[:-1],
            "per_level": {"0": {"auroc_median": 0.5}, HOSTILE[:-1]: {HOSTILE[:-1]: HOSTILE[:-1]}},
        }
        content["provenance"] = {
            HOSTILE[:-1]: HOSTILE[:-1],
            "calibrations": [
                {
                    "source": {"name": HOSTILE[:-1]},
                    "aggregator": HOSTILE[:-1],
                    "unit": HOSTILE[:-1],
                    "n_watched": 1,
                    "fpr": 0.1,
                }
            ],
        }
        content["inputs"][0]["eps"] = 1e-6

    return forged(made, folder / "pack", manifest)


def test_hostile_pack_is_escaped_by_inspect_copy_subset_and_diff(monkeypatch, capsys, tmp_path, hostile_pack):
    code, out, _ = run(monkeypatch, capsys, "inspect", hostile_pack)
    assert (
        code == 0
        and out.count(r"\x1b]0;pwned\x07") >= 3
        and "[red]x[/nonsense]:skull:" in out
        and len(out.splitlines()) == len([line for line in out.splitlines() if line])
    )
    code, out, _ = run(monkeypatch, capsys, "concepts", hostile_pack)
    assert code == 0 and out.count(r"\x1b]0;pwned\x07") == 12 and out.count("[red]x[/nonsense]:skull:") >= 13
    code, out, _ = run(monkeypatch, capsys, "inspect", hostile_pack, "--json")
    told = json.loads(out)
    assert (
        told["host"]["model_id"] == HOSTILE[:-1]
        and told["name"] == MARKUP
        and told["quality"][HOSTILE[:-1]] == HOSTILE[:-1]
    )
    (tmp_path / "new.json").write_text(json.dumps({f"{MARKUP}1": {"name": f"{MARKUP}!"}}))
    (tmp_path / "bad.json").write_text(json.dumps({HOSTILE: HOSTILE}))
    (tmp_path / "tree.json").write_text(json.dumps({f"{MARKUP}1": [f"{MARKUP}2"], HOSTILE: [HOSTILE]}))
    clean = forged(
        ProbePack.open(hostile_pack),
        tmp_path / "clean",
        lambda content: content.update(host={"model_id": "m", "hidden_size": HIDDEN}, quality={}, provenance={}),
    )
    for arguments, status in (
        (["pack", "subset", clean, tmp_path / "part", "--concept", f"{MARKUP}4"], 0),
        (["pack", "subset", clean, tmp_path / "no", "--concept", f"{MARKUP} 1"], 2),
        (["pack", "subset", clean, tmp_path / "nothing", "--concept", HOSTILE], 2),
        (["pack", "rename", clean, tmp_path / f"{ESCAPES}new", "--concepts", tmp_path / "new.json"], 0),
        (["pack", "rename", clean, tmp_path / "bad", "--concepts", tmp_path / "bad.json"], 2),
        (["pack", "merge", clean, tmp_path / "part", tmp_path / "both"], 2),
        (["pack", "merge", clean, hostile_pack, tmp_path / "both"], 2),
        (["pack", "merge", clean, tmp_path / "part", tmp_path / "both", "--prefix"], 0),
        (["pack", "diff", hostile_pack, clean], 1),
        (["pack", "diff", hostile_pack, tmp_path / f"{ESCAPES}new", "--json"], 1),
        (["quantize", clean, tmp_path / f"{ESCAPES}8"], 0),
        (["hierarchy", clean, tmp_path / "tree.json"], 2),
        (["hierarchy", clean, "--from-weights"], 2),
        (["pack", "push", clean, f"org/{ESCAPES}"], 2),
    ):
        code, out, error = run(monkeypatch, capsys, *arguments)
        assert code == status, (arguments, code, out, error)
        if "--json" in arguments:
            json.loads(out)


@pytest.mark.parametrize(
    "where, change, tensors",
    [
        ("files", lambda content: content["files"].update({HOSTILE: {"sha256": "0" * 64, "size": 3}}), None),
        ("dtype", lambda content: content.update(dtype=HOSTILE), None),
        ("architecture", lambda content: content.update(architecture=HOSTILE), None),
        ("name", lambda content: content.update(name=HOSTILE), None),
        ("format", lambda content: content.update(format=HOSTILE), None),
        ("format_version", lambda content: content.update(format_version=HOSTILE), None),
        ("score_rule", lambda content: content.update(score_rule=HOSTILE), None),
        ("site", lambda content: content["inputs"][0].update(site=HOSTILE), None),
        ("norm", lambda content: content["inputs"][0].update(norm=HOSTILE), None),
        ("n_layers", lambda content: content["host"].update(n_layers=HOSTILE), None),
        ("hidden_size", lambda content: content["host"].update(hidden_size=HOSTILE), None),
        ("recommended", lambda content: content["recommended"].update({HOSTILE: HOSTILE}), None),
        ("tensor", lambda content: None, lambda held: held.update({HOSTILE[:-1]: torch.ones(3)})),
        (
            "aggregated",
            lambda content: None,
            lambda held: held.update({f"alert_threshold:{HOSTILE[:-1]}": torch.full((12,), 0.5)}),
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_hostile_part_of_a_pack_is_escaped_by_every_command(
    monkeypatch, capsys, tmp_path, hostile_pack, where, change, tensors
):
    pack = forged(ProbePack.open(hostile_pack), tmp_path / "pack", change, tensors or (lambda held: None))
    for arguments in (
        ["inspect", pack],
        ["inspect", pack, "--json"],
        ["concepts", pack],
        ["quantize", pack, tmp_path / "q"],
        ["watch", "nowhere", pack],
        ["pack", "diff", pack, hostile_pack],
    ):
        code, out, _ = run(monkeypatch, capsys, *arguments)
        assert code in (0, 1, 2)
        if arguments[-1] == "--json" and out:
            json.loads(out)


CLAIMS = [
    ("quality", {"per_level": []}),
    ("quality", {"per_level": {"0": []}}),
    ("quality", {"per_level": {"0": {"auroc_median": HOSTILE[:-1]}}}),
    ("quality", {"per_level": {"0": {"auroc_p10": 10**400}}}),
    ("quality", {"auroc_median": HOSTILE[:-1]}),
    ("quality", {"n_test": 10**4000}),
    ("quality", {"alerts": []}),
    ("quality", {"alerts": {"each": []}}),
    ("quality", {"alerts": {"each": {"concepts": [1]}}}),
    ("provenance", {"calibrations": [1]}),
    ("provenance", {"calibrations": HOSTILE[:-1]}),
    ("provenance", {"calibrations": [{}]}),
    ("provenance", {"calibrations": {"a": 1}}),
    ("provenance", {"calibrations": [{"source": HOSTILE[:-1]}]}),
    ("provenance", {"calibrations": [{"source": {"name": [HOSTILE[:-1]]}}]}),
    (
        "provenance",
        {
            "calibrations": [
                {"source": {"name": "x"}, "aggregator": "each", "n_watched": 1, "fpr": HOSTILE[:-1], "unit": "token"}
            ]
        },
    ),
    ("provenance", {"calibrations": [{"source": {"name": "x"}, "aggregator": "each"}]}),
    ("provenance", {"calibrations": [{"source": {"name": "x"}, "expansion": [1]}]}),
    ("provenance", {"calibrations": [{"source": {"name": "x"}, "expansion": {"recall": HOSTILE[:-1]}}]}),
    ("host", {"model_id": [HOSTILE[:-1]]}),
    ("host", {"n_layers": HOSTILE[:-1]}),
    ("host", {"adapters": 5}),
    ("host", {"adapters": [1]}),
    ("host", {"fingerprint": 3}),
    ("quality", {"x": json.loads("[" * 150 + "]" * 150)}),
    ("provenance", {"x": json.loads('{"a":' * 150 + "1" + "}" * 150)}),
]


@pytest.mark.parametrize("part, claim", CLAIMS, ids=lambda value: repr(value)[:50].encode("ascii", "replace").decode())
def test_manifest_claims_of_a_wrong_type_are_one_line_in_every_command(
    monkeypatch, capsys, tmp_path, hostile_pack, part, claim
):
    pack = forged(ProbePack.open(hostile_pack), tmp_path / "pack", lambda content: content.update({part: claim}))
    for arguments in (
        ["inspect", pack],
        ["inspect", pack, "--json"],
        ["concepts", pack],
        ["quantize", pack, tmp_path / "q"],
        ["pack", "rename", pack, tmp_path / "r", "--name", "r"],
        ["pack", "subset", pack, tmp_path / "s", "--concept", "*"],
        ["pack", "merge", pack, hostile_pack, tmp_path / "m"],
        ["watch", "nowhere", pack],
        ["calibrate", pack, "--benign", tmp_path / "none.txt", "--fpr", "0.1"],
    ):
        code, out, error = run(monkeypatch, capsys, *arguments)
        name = f"{part} is nested" if "x" in claim else f"{part}.{next(iter(claim))}"
        assert code == 2 and not out and error.count("\n") == 1 and name in error, (arguments, error)


def test_card_that_is_not_text_does_not_stop_a_copy(monkeypatch, capsys, tmp_path, hostile_pack):
    pack = forged(
        ProbePack.open(hostile_pack),
        tmp_path / "pack",
        lambda content: content.update(host={"hidden_size": HIDDEN}, quality={}, provenance={}),
    )
    (pack / "README.md").write_bytes(b"# caf\xe9 \xff\n")
    content = json.loads((pack / "manifest.json").read_text())
    content["files"]["README.md"] = {"sha256": sha256(pack / "README.md"), "size": (pack / "README.md").stat().st_size}
    (pack / "manifest.json").write_text(json.dumps(content))
    assert (
        run(monkeypatch, capsys, "quantize", pack, tmp_path / "int8")[0] == 0
        and "caf\ufffd" in (tmp_path / "int8/README.md").read_text()
    )
    opened = ProbePack.open(pack)
    expansion = Expansion(
        np.where(opened.tree.has_children, 0.1, np.nan).astype(np.float32), 0.9, 0.0, 1, 9, 9, 0.0, 1.0, 0, (0,)
    )
    assert (
        "caf\ufffd"
        in (write_calibrated(opened, tmp_path / "calibrated", expansion=expansion).directory / "README.md").read_text()
    )


# -- a host, its tokens and its documents --------------------------------------------------------


def test_tokens_documents_and_names_are_escaped_when_a_model_runs(monkeypatch, capsys, tmp_path, host, hostile_pack):
    prompt = f"{HOSTILE[:-1]}20"
    code, out, shown = run(
        monkeypatch, capsys, "watch", host, hostile_pack, "--prompt", prompt, "--max-new-tokens", "5", "--json"
    )
    assert code == 0 and json.loads(out)["generated_tokens"] >= 1
    assert r"\x1b]0;pwned" in shown and "[red]x[/nonsense]" in shown
    watch = ("watch", host, hostile_pack, "--prompt", prompt, "--max-new-tokens", "5")
    code, out, shown = run(monkeypatch, capsys, *watch, "--stop-on", "*:above=0", "--concept", "*1", "--json")
    assert code == 0 and json.loads(out)["stopped"]["name"].startswith(MARKUP)
    assert any(line.startswith("stopped at ") for line in shown.splitlines())
    for option in ("--stop-on", "--concept"):
        code, out, error = run(monkeypatch, capsys, *watch, option, HOSTILE)
        assert code == 2 and not out and error.count("\n") == 1 and r"\x1b]0;pwned" in error
    code, _, error = run(
        monkeypatch, capsys, "watch", host, hostile_pack, "--prompt", prompt, "--max-new-tokens", "2", "--strict"
    )
    assert code == 2 and r"\x1b]0;pwned" in error
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(
        sys, "argv", ["probemon", "watch", str(host), str(hostile_pack), "--prompt", prompt, "--max-new-tokens", "4"]
    )
    with pytest.raises(SystemExit) as ended, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cli.main()
    out, error = capsys.readouterr()
    shown = re.sub("\x1b\\[[0-9;?]*[A-Za-z]|\r", "", out)  # rich's colours and movements
    assert (
        ended.value.code == 0
        and "pwned" in shown
        and not harmful(shown)
        and "\x1b[31m" not in out
        and not harmful(re.sub("\x1b\\[[0-9;?]*[A-Za-z]|\r", "", error))
    )
    monkeypatch.delenv("FORCE_COLOR")
    for name in ("a", "b"):
        lines = [
            {"id": f"{HOSTILE}{i}", "text": f"{HOSTILE[:-1]}{i}" if i else HOSTILE, HOSTILE: HOSTILE} for i in range(4)
        ]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        code, out, _ = run(
            monkeypatch,
            capsys,
            "analyze",
            host,
            hostile_pack,
            tmp_path / f"{name}.jsonl",
            "--out",
            tmp_path / f"{ESCAPES}{name}",
            "--dtype",
            "float32",
        )
        assert code == 0 and "1 bad ones" in out
    for arguments, status in (
        (
            [
                "analyze",
                host,
                hostile_pack,
                tmp_path / "a.jsonl",
                "--out",
                tmp_path / f"{ESCAPES}a",
                "--dtype",
                "float32",
                "--json",
            ],
            0,
        ),
        (["diff", tmp_path / f"{ESCAPES}a", tmp_path / f"{ESCAPES}b"], 0),
        (["diff", tmp_path / f"{ESCAPES}a", tmp_path / f"{ESCAPES}b", "--json"], 0),
        (["report", tmp_path / f"{ESCAPES}a", "--out", tmp_path / f"{ESCAPES}.html"], 0),
        (["report", tmp_path / f"{ESCAPES}b", "--json"], 0),
        (
            [
                "calibrate",
                hostile_pack,
                "--benign",
                tmp_path / "a.jsonl",
                "--fpr",
                "0.5",
                "--confidence",
                "0.5",
                "--unit",
                "document",
                "--model",
                host,
                "--out",
                tmp_path / f"{ESCAPES}c",
                "--watch",
                f"{MARKUP}1",
            ],
            None,
        ),
        (["routing", host, "--prompt", prompt], None),
    ):
        code, out, error = run(monkeypatch, capsys, *arguments)
        assert code == status or (status is None and code in (0, 2)), (arguments, code, error)
        if "--json" in arguments:
            json.loads(out)


def test_imports_escape_hostile_names(monkeypatch, capsys, tmp_path):
    folder = tmp_path / f"lens{ESCAPES}"
    key = f"{MARKUP}\x1b[2J:0"
    hatcat_packs.write_layered(folder, hatcat_packs.modules(["linear"], HIDDEN, keys=["A:0", "B:1"]))
    hatcat_packs.write_hierarchy(folder, {"A:0": ["B:1", key.replace(":0", ":1")]})
    common = ["--site", "resid_post.1", "--normalize", "none"]
    code, out, _ = run(
        monkeypatch, capsys, "import", "hatcat", folder, tmp_path / f"ours{ESCAPES}", *common, "--name", MARKUP
    )
    assert code == 0 and r"\x1b[2J" in out
    torch.save(hatcat_packs.module("linear", HIDDEN, 3).state_dict(), folder / "layer1" / "C\x1b[2J\u202e.pt")
    code, out, _ = run(monkeypatch, capsys, "import", "hatcat", folder, tmp_path / "more", *common, "--allow-unlisted")
    assert (code == 0 and r"C\x1b[2J\u202e:1" in out) or code == 2
    (folder / "layer1" / "C\x1b[2J\u202e.pt").write_bytes(b"\x80\x02cposix\x1b]0;pwned\x07\nsys\x1b[2Jtem\nq\x00.")
    code, _, error = run(monkeypatch, capsys, "import", "hatcat", folder, tmp_path / "no", *common, "--allow-unlisted")
    assert code == 2 and "posix" in error
    save_file({HOSTILE[:-1]: torch.ones(1, 12)}, tmp_path / "x.safetensors")
    (tmp_path / "map.json").write_text(
        json.dumps({"site": HOSTILE, "normalize": HOSTILE, "probes": {HOSTILE: {"weight": HOSTILE}}})
    )
    assert (
        run(
            monkeypatch,
            capsys,
            "import",
            "safetensors",
            tmp_path / "x.safetensors",
            tmp_path / "no",
            "--mapping",
            tmp_path / "map.json",
        )[0]
        == 2
    )
    (tmp_path / "map.json").write_text(
        json.dumps(
            {
                "site": "resid_post.1",
                "normalize": "none",
                "probes": {f"{MARKUP}": {"weight": HOSTILE[:-1], "name": MARKUP}},
            }
        )
    )
    code, out, _ = run(
        monkeypatch,
        capsys,
        "import",
        "safetensors",
        tmp_path / "x.safetensors",
        tmp_path / f"{ESCAPES}p",
        "--mapping",
        tmp_path / "map.json",
        "--name",
        MARKUP,
    )
    assert code == 0 and r"\x1b" in out
    (tmp_path / "kit.json").write_text(json.dumps({HOSTILE: {HOSTILE: HOSTILE}}))
    assert run(monkeypatch, capsys, "import", "probekit", tmp_path / "kit.json", tmp_path / "no", *common)[0] == 2
    for name in ("probelab", "steerkit", "saelens", "hallucination"):
        options = {
            "probelab": common,
            "steerkit": ["--scale", "1"],
            "saelens": [],
            "hallucination": ["--normalize", "none"],
        }[name]
        (tmp_path / name).mkdir()
        for file in ("cfg.json", "probe_config.json", f"{ESCAPES}.pt", "a.safetensors"):
            (tmp_path / name / file).write_text(json.dumps({HOSTILE: HOSTILE}))
        assert run(monkeypatch, capsys, "import", name, tmp_path / name, tmp_path / "no", *options)[0] == 2


# -- views that others' consoles show --------------------------------------------------------------


def test_views_escape_text_on_any_console():
    """`LiveView(Console(), title=...)` is for everybody: a title is no markup, a token no escape."""
    for view in (LiveView, LiveRouting):
        console = Console(width=100, height=30, force_terminal=True, file=io.StringIO(), record=True)
        shown = view(console, title=HOSTILE)
        if view is LiveRouting:
            console.print(
                shown.render(
                    {
                        "streams": [],
                        "alerts": [HOSTILE],
                        "unjudged": {},
                        "latency_us": {},
                        "n_tokens": 1,
                        "n_unseen": 0,
                        "memory_watermark_bytes": 0,
                        "states": {},
                    }
                )
            )
        else:
            console.print(shown.render())
        text = console.export_text()
        assert not harmful(text) and "[red]x[/nonsense]" in text


# -- signals ---------------------------------------------------------------------------------------

CALLBACK = """
import ctypes, os, signal, sys, time
from probemon.cli import app as cli
from probemon.cli import signals
if {where!r} == "callback":
    @ctypes.CFUNCTYPE(None)
    def called():
        signal.raise_signal(signal.SIGTERM)
        time.sleep(0.01)
def command():
    try:
        if {where!r} == "callback":
            called()
            if {then!r} == "error":
                raise RuntimeError("what was called back gave nothing")
            time.sleep(60)
        else:
            import numba, numba.core.codegen
            codegen = numba.core.codegen
            library = codegen.JITCodeLibrary if hasattr(codegen, "JITCodeLibrary") else codegen.CPUCodeLibrary
            before = numba.core.codegen.CPUCodeLibrary._object_compiled_hook.__func__
            def hook(cls, module, buffer):
                signal.raise_signal(signal.SIGTERM)
                return before(cls, module, buffer)
            numba.core.codegen.CPUCodeLibrary._object_compiled_hook = classmethod(hook)
            numba.njit(lambda x: x + 1)(2)
            time.sleep(60)
    finally:
        print("taken away", flush=True)
cli.app = lambda **_: command()
cli.main()
"""


@pytest.mark.parametrize("where, then", [("callback", "error"), ("callback", "sleep"), ("numba", "")])
def test_signal_during_a_callback_from_compiled_code_ends_cleanly(where, then, tmp_path):
    if where == "numba":
        pytest.importorskip("numba")
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.getcwd()}
    done = subprocess.run(
        [sys.executable, "-c", CALLBACK.format(where=where, then=then)],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment,
    )
    assert done.returncode == 143 and done.stderr == "" and done.stdout == "taken away\n"


def test_line_reaches_a_pipe_at_once():
    script = "import os; from probemon.cli.terminal import say; say('ready'); os._exit(0)"
    environment = {**os.environ, "PYTHONUNBUFFERED": ""}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "ready\n")
