"""The command line and the stream, on the real demo model, as a user runs them."""

import dataclasses
import io
import json
import math
import os
import re
import subprocess
import sys
import threading
import time
import types

import numpy as np
import pytest
import torch
from rich.console import Console

from conftest import n_hooks
from probemon import DynamicProbeManager, ProbePack
from probemon import cli as command_line
from probemon.bundled import load_bundled
from probemon.cli.watch.live_view import LiveView, PlainView, path_text, printable, strength_bar, summary
from probemon.errors import ConfigError
from probemon.monitor.result import describe
from probemon.packs.copies import copy_pack
from probemon.tracking.recording import LAST

PACK = "probes/wordnet-smollm2-135m"
CHAT = [{"role": "user", "content": "Name two animals."}]


@pytest.fixture(scope="module")
def demo():
    return load_bundled()


@pytest.fixture(scope="module")
def manager():
    return DynamicProbeManager(ProbePack.open(PACK))


@pytest.fixture
def run(capsys, monkeypatch):
    """A command in this process: a shell of its own takes seconds to begin."""

    def command(*arguments):
        monkeypatch.setattr(sys, "argv", ["probemon", *arguments])
        with pytest.raises(SystemExit) as ended:
            command_line.main()
        told = capsys.readouterr()
        return ended.value.code, told.out, told.err

    return command


def cli(*arguments, **more):
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "140"}
    return subprocess.run(
        [sys.executable, "-m", "probemon.cli", *arguments], capture_output=True, text=True, env=environment, **more
    )


# -- stream --------------------------------------------------------------------------------------


def test_stream_gives_every_token_with_the_scores_of_the_result(demo, manager):
    model, tokenizer = demo
    events = list(manager.stream(model, tokenizer, CHAT, include_prompt=True, max_new_tokens=8, do_sample=False))
    result = events[-1].result
    assert [e.position for e in events] == result.position.tolist() == list(range(len(events)))
    assert [e.token_id for e in events] == result.token_id.tolist()
    assert [e.phase for e in events] == ["prompt"] * (len(events) - 8) + ["generated"] * 8
    for i, event in enumerate(events):
        assert np.array_equal(event.scores.active_scores(0), result.scores.active_scores(i))
        assert event.unseen == (LAST if i == len(events) - 1 else "")
        assert event.leading(3) == result.leading(i, 3)
    bare = model.generate(
        **tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_tensors="pt", return_dict=True),
        max_new_tokens=8,
        do_sample=False,
    )
    assert bare[0].tolist() == [e.token_id for e in events]


def test_living_thing_concept_fires_on_animals_only(demo, manager):
    """What the whole thing is for, once, end to end."""
    model, tokenizer = demo
    text = "The whale swam past the boat, and a dog barked at the old horse near the table."
    with manager.attach(model, tokenizer, strict=True) as run, torch.no_grad():
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        model(ids)
    result, living = run.result(ids), manager.pack.find("living thing")
    fired = {
        tokenizer.decode([int(result.token_id[i])]).strip()
        for i in range(len(result))
        if living in result.scores.fired(i)
    }
    assert fired == {"whale", "dog", "horse"}


def test_closing_the_stream_stops_the_generation(demo, manager):
    model, tokenizer = demo
    before, threads = n_hooks(model), threading.active_count()
    events = manager.stream(model, tokenizer, CHAT, max_new_tokens=2000, do_sample=False)
    next(events)
    begin = time.monotonic()
    events.close()
    assert time.monotonic() - begin < 30  # 2,000 tokens would take minutes
    assert n_hooks(model) == before and threading.active_count() == threads
    assert "generate" not in vars(model)


def test_error_in_generate_reaches_the_consumer(demo, manager):
    model, tokenizer = demo
    with pytest.raises(NotImplementedError, match="guidance_scale"):
        list(manager.stream(model, tokenizer, CHAT, guidance_scale=2.0, max_new_tokens=3))
    with pytest.raises(ConfigError, match="beams"):
        manager.stream(model, tokenizer, CHAT, num_beams=2)
    with pytest.raises(ConfigError, match="needs the model's tokenizer"):
        manager.stream(model, None, CHAT)
    with pytest.raises(ConfigError, match="one sequence"):
        manager.stream(model, tokenizer, CHAT, num_return_sequences=2)


# -- views ---------------------------------------------------------------------------------------


def test_views_show_each_token_with_its_path(demo, manager):
    model, tokenizer = demo
    wide = Console(width=140, height=60, record=True, force_terminal=True, file=io.StringIO())
    plain = Console(width=140, record=True, file=io.StringIO())
    cut = Console(width=140, record=True, file=io.StringIO())
    with LiveView(wide, title="t", n_rows=40) as live, PlainView(plain) as lines, PlainView(cut, n_concepts=0) as few:
        for event in manager.stream(model, tokenizer, CHAT, max_new_tokens=12, do_sample=False):
            live.show(event)
            lines.show(event)
            few.show(event)
            result = event.result
    wide.print(live.render())
    shown, listed = wide.export_text(), plain.export_text().splitlines()
    lines_at = {int(line.split()[0]): line for line in listed}
    assert len(lines_at) == len(listed) and LAST in listed[-1]
    cut_at, named = {int(line.split()[0]): line for line in cut.export_text().splitlines()}, 0
    for i in range(len(result) - 12, len(result)):
        leading = result.leading(i, 2)
        position = int(result.position[i])
        if not leading and i < len(result) - 1:  # nothing to say, and no line for it
            assert position not in lines_at
            continue
        token = tokenizer.decode([int(result.token_id[i])])
        assert printable(token).strip() in lines_at[position]
        for concept in leading:
            named += 1
            path = " > ".join(concept.path)
            assert f"{path} {concept.strength:+.1f}" in lines_at[position]
            assert path in shown
        n_all = len(result.leading(i, 1_000))
        assert (f" and {n_all} more" in cut_at.get(position, "")) == (n_all > 0)
        assert ("more" in lines_at[position]) == (n_all > 3)
    assert named > 0 and "leading concepts (at most 2), from the root" in shown
    summary(plain, result, ["a closing line"])
    text = plain.export_text()
    assert "a closing line" in text and text.count(" > ") >= 1


def test_summary_explains_an_empty_list_and_unfamiliar_text(demo, tmp_path):
    """Thresholds for a sentence that nothing exceeds, and a calibration to which every state is far."""
    model, tokenizer = demo
    pack = ProbePack.open(PACK)
    far = dataclasses.replace(pack.familiar[0], limit=-1.0)
    odd = copy_pack(
        pack,
        tmp_path / "odd",
        "Odd",
        {},
        aggregated={"max": torch.ones(pack.n_probes)},
        familiar=[far],
        alert_threshold=torch.full((pack.n_probes,), 0.1),
    )
    manager = DynamicProbeManager(odd)
    *_, event = manager.stream(model, tokenizer, CHAT, max_new_tokens=12, do_sample=False)
    plain = Console(width=140, record=True, file=io.StringIO())
    summary(plain, event.result, [])
    text = plain.export_text()
    n_firing = sum(len(event.result.scores.fired(t)) > 0 for t in event.result.tokens_of(0, "generated"))
    assert n_firing > 1  # else the next line would say nothing
    assert f"Concepts fired at {n_firing} tokens of the answer, but none exceeds its threshold for a wh" in text
    assert "11 of 11 tokens (100%) are unlike the text that this pack was calibrated on" in text


@pytest.mark.parametrize(
    "token, shown", [("\n", "\\n"), (" ", "' '"), ("\x1b[31m", "\\x1b[31m"), (" whale", " whale"), ("", "''")]
)
def test_control_characters_never_reach_the_terminal(token, shown):
    assert printable(token) == shown


def test_shortened_path_keeps_the_root_and_the_concept():
    concept = describe(ProbePack.open(PACK), ProbePack.open(PACK).find("whale"), 0.5)
    full = " > ".join(concept.path)
    assert path_text(concept).plain == full == path_text(concept, len(full)).plain
    widths = [len(path_text(concept, width).plain) for width in range(len(full) + 1)]
    assert widths == sorted(widths)
    assert all(shown <= max(width, len("whale")) for width, shown in enumerate(widths))
    assert [path_text(concept, width).plain for width in (0, 9, 17)] == ["whale", "… > whale", "whole > … > whale"]
    for width in (17, 30, 50, len(full) - 1):
        shown = path_text(concept, width).plain.split(" > ")
        assert shown[:2] == ["whole", "…"] and concept.path[-len(shown) + 2 :] == tuple(shown[2:])


@pytest.mark.parametrize("width", [36, 45, 59, 60, 80])
def test_live_view_shows_concept_and_strength_at_every_width(manager, width):
    """And that a token is unseen: not an end of the root's name, or of nothing."""
    pack = manager.pack
    concept = describe(pack, pack.find("whale"), 0.9)
    console = Console(width=width, height=20, force_terminal=True, file=io.StringIO())
    view = LiveView(console, title="t")
    for unseen, leading in (("", [concept]), ("hidden state is not finite", [])):
        event = types.SimpleNamespace(
            token=" ales", unseen=unseen, reading=(), coverage=types.SimpleNamespace(active=[1]), pack=pack,
            leading=lambda k, above, leading=leading: leading, ranked=lambda k, above: [],
        )  # fmt: skip
        view.show(event)
    with console.capture() as capture:
        console.print(view.render())
    lines = re.sub(r"\x1b\[[0-9;]*m", "", capture.get()).splitlines()
    assert any("whale " in line and f"{concept.strength:+.1f}" in line for line in lines), lines
    assert any("unseen: " in line for line in lines) and all(len(line) <= width for line in lines)


def test_small_terminal_shows_the_newest_token(demo, manager):
    model, tokenizer = demo
    small = Console(width=80, height=16, record=True, force_terminal=True, file=io.StringIO())
    view = LiveView(small, title="t")
    for event in manager.stream(model, tokenizer, CHAT, max_new_tokens=30, do_sample=False):
        view.show(event)
        with small.capture() as capture:
            small.print(view.render())
        shown = capture.get()
        assert shown.count("\n") <= 16 and re.search(r"\d tokens? scored", shown)
        assert not event.unseen or "unseen: " in shown
    view.show(dataclasses.replace(event, token="a list\n" * 40))  # which must not push the table off the screen
    with small.capture() as capture:
        small.print(view.render())
    assert capture.get().count("\n") <= 16 and re.search(r"\d tokens? scored", capture.get())


def test_infinite_strength_has_a_full_bar():
    pack = ProbePack.open(PACK)
    concept = describe(pack, pack.find("whale"), 1.0)
    assert math.isinf(concept.strength) and strength_bar(concept).plain == "███ +inf"


# -- commands ------------------------------------------------------------------------------------


def test_watch_prints_one_json_object_and_shows_tokens_on_stderr():
    done = cli("watch", "demo", PACK, "--prompt", "Tell me about dogs.", "--max-new-tokens", "10", "--json", check=True)
    lines, answer = done.stderr.splitlines(), json.loads(done.stdout)
    assert answer["generated_tokens"] == 10 and answer["unseen_tokens"] == 1 and answer["dropped"] == 0
    assert (
        answer["probes_total"] == ProbePack.open(PACK).n_probes and answer["tokens"] > 20 and answer["measured"] is None
    )
    assert 1 < answer["probes_active_per_token"] <= answer["probes_evaluated_per_token"] <= answer["probes_total"]
    assert "\x1b" not in done.stdout + done.stderr
    # A line for every token with something to say, the last one's that it is unseen, then all of the text.
    assert 2 <= sum(line.split()[0].isdigit() for line in lines if line.split()) <= 10
    assert "the answer, sentence by sentence" in lines and "dogs" in done.stderr.lower()
    assert answer["alert_set"] == "precision_0.9"


def test_inspect_describes_the_pack(run):
    answer = json.loads(run("inspect", PACK, "--json")[1])
    assert (
        answer["n_probes"] == ProbePack.open(PACK).n_probes
        and answer["whole"] is True
        and answer["golden_error"] <= 1e-5
    )
    assert answer["quality"]["auroc_median"] >= 0.95
    code, text, _ = run("inspect", PACK)
    assert (
        code == 0
        and "every file has its hash" in text
        and f"AUROC: median {answer['quality']['auroc_median']:.3f}" in text
    )


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["inspect", "nowhere"], "nowhere"),
        (["watch", "demo", "nowhere"], "nowhere"),
        (["watch", "nowhere", PACK], "'nowhere' is neither a folder nor a model"),
        (["watch", "demo", PACK, "--prompt", "  "], "the prompt is empty"),
        (["watch", "demo", PACK, "--max-new-tokens", "0"], "--max-new-tokens is 0: give 1 or more"),
        (["watch", "demo", PACK, "--threads", "-1"], "--threads is -1: give 1 or more"),
        (["watch", "demo", PACK, "--max-new-tokens", "many"], "valid integer"),
        (["watch", "demo", PACK, "--device", "quantum"], "device 'quantum' cannot be used here"),
        (["watch", "demo", PACK, "--device", "meta"], "device 'meta' cannot be used: tensors on it have no values"),
        (
            ["watch", "other"],
            "PACK is missing: only the model 'demo' has one that comes with probemon, and there is no folder 'other'",
        ),
        (["watch", "demo", PACK, "--out", "/proc/none/scores.jsonl"], "nothing can be written in /proc"),
        (
            ["calibrate", PACK, "--benign", "README.md", "--fpr", "0.01", "--out", "/proc/none/pack"],
            "nothing can be written in /proc",
        ),
        (["observe"], "No such command 'observe'"),
        (["inspect", PACK, "--jsno"], "No such option"),
    ],
)
def test_bad_input_is_one_line_and_status_2(run, arguments, words):
    code, out, error = run(*arguments)
    assert code == 2 and out == "" and error.count("\n") == 1 and words in error


@pytest.mark.parametrize(
    "arguments",
    [
        ["inspect", "{}"],
        ["analyze", "demo", PACK, "{}", "--out", "nowhere"],
        ["analyze", "demo", PACK, "README.md", "--out", "{}"],
        ["calibrate", PACK, "--benign", "README.md", "--fpr", "0.1", "--out", "{}"],
        ["watch", "{}", PACK],
        ["watch", "demo", PACK, "--pack", "a={}"],
        ["import", "hatcat", "{}", "nowhere", "--site", "resid_post.1", "--normalize", "none"],
    ],
)
def test_text_in_place_of_a_path_is_one_line_and_status_2(run, arguments):
    code, _, error = run(*(argument.format("so it was " * 30) for argument in arguments))
    assert code == 2 and len(error.splitlines()) == 1
    assert "File name too long" in error or "no such folder" in error


def test_damaged_pack_is_one_line_and_status_2(run, tmp_path):
    import shutil

    shutil.copytree(PACK, tmp_path / "p")
    card = tmp_path / "p" / "README.md"
    card.write_text(card.read_text().replace("a", "b", 1))
    code, _, error = run("inspect", str(tmp_path / "p"))
    assert code == 2 and error.count("\n") == 1 and "README.md" in error


# -- other ways to run the model --------------------------------------------------------------------


def test_pipeline_and_streamer_are_watched_like_generate(demo, manager):
    from transformers import TextIteratorStreamer, pipeline

    model, tokenizer = demo
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer)
    with manager.attach(model, tokenizer) as run:
        text = pipe("Whales are", max_new_tokens=6, do_sample=False, return_full_text=True)[0]["generated_text"]
        streamer = TextIteratorStreamer(tokenizer)
        inputs = tokenizer("Whales are", return_tensors="pt")
        thread = threading.Thread(
            target=model.generate, kwargs={**inputs, "streamer": streamer, "max_new_tokens": 6, "do_sample": False}
        )
        thread.start()
        streamed = "".join(streamer)
        thread.join()
        out = model.generate(**inputs, max_new_tokens=6, do_sample=False)
    assert tokenizer.decode(out[0], skip_special_tokens=True) == text and streamed == tokenizer.decode(out[0])
    first, second, third = (run.result(recording.output) for recording in run.recordings)
    for other in (first, second):
        assert other.token_id.tolist() == third.token_id.tolist() and other.coverage.n_unseen == 1
        assert np.array_equal(other.scores.values, third.scores.values)


def test_command_line_starts_without_torch():
    """It takes seconds, and help, errors and reports need none of it."""
    done = subprocess.run(
        [sys.executable, "-c", "import probemon.cli.app, sys; print('torch' in sys.modules)"],
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == "False", done.stderr
