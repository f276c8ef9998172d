"""The commands `probemon bem train | eval | distil | inspect` on a tiny model: files, output and errors."""

import contextlib
import json
import os
import signal
import sys
import time

import pytest
import torch
from safetensors.torch import load_file

from arrangements import tokenizer
from bem_oracle import make_host
from probemon.adapters.bem import BemConfig, attach_bem
from probemon.adapters.bem.config import LEVELS
from probemon.adapters.bem.evaluation.beside import LoraBeside
from probemon.adapters.bem.evaluation.held_out import measure, share_at_limits
from probemon.adapters.bem.lessons import check_row, make_batches, make_lesson, split
from probemon.adapters.bem.losses import codes_taken, recorded_codes
from probemon.adapters.bem.training import evaluate
from probemon.adapters.cli.bem_rows import read as read_bem_rows
from probemon.cli import app as command_line
from probemon.errors import ConfigError

SMALL = ["--rank", "2", "--set", "width=6", "--set", "chunk_tokens=3", "--set", "prefix_tokens=6", "--batch", "4"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A host, and rows of 16 documents: two rows each, whose answer is one word four times, another by the prompt."""
    folder = tmp_path_factory.mktemp("bem")
    make_host().save_pretrained(folder / "host")
    tokenizer().save_pretrained(folder / "host")
    rows = [
        {"prompt": f"w{kind} w{20 + i} w{3 + i}", "answer": " ".join([word] * 4), "group": f"d{i}"}
        for i in range(16)
        for kind, word in ((1, "w11"), (2, "w12"))
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def run(capsys, monkeypatch):
    def bem(*arguments):
        monkeypatch.setattr(sys, "argv", ["probemon", "bem", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit:
            command_line.main()
        told = capsys.readouterr()
        return exit.value.code, told.out, told.err

    return bem


@pytest.fixture(scope="module")
def words():
    return tokenizer()


def lessons_of(place, words):
    rows = [json.loads(line) for line in (place / "rows.jsonl").read_text().splitlines()]
    return [make_lesson(row, "row", words) for row in rows], [int(row["group"][1:]) for row in rows]


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT asks
def test_train_eval_inspect_and_distil_agree_with_the_library(place, run, words, tmp_path):
    out = tmp_path / "adapter"
    train = ["train", place / "host", place / "rows.jsonl", "--out", out, *SMALL, "--epochs", "6", "--lr", "0.02"]
    code, text, errors = run(*train, "--kl", "0", "--json")
    assert code == 0, errors
    told = json.loads(text)
    assert told["rows"] == {"train": 22, "choose": 4, "test": 6} and told["held_out"]["documents"] == 3
    assert told["held_out"]["loss"] < told["held_out"]["bare_loss"] - 0.3  # it learned which word follows
    assert not [*out.rglob("unfinished.json")]

    lessons, documents = lessons_of(place, words)
    batches = list(make_batches(lessons, 4, 0))
    with attach_bem(make_host(), out) as bem:
        steered = evaluate(bem.host, batches)
        assert told["trainable"] == sum(parameter.numel() for parameter in bem.parameters())
        with torch.no_grad():
            says = bem.host(batches[0]["input_ids"], attention_mask=batches[0]["attention_mask"]).logits
    code, text, errors = run("eval", place / "host", out, place / "rows.jsonl", "--batch", "5", "--json")
    measured = json.loads(text)
    held_out = measured["held_out"]
    assert code == 0 and held_out["documents"] == len(set(documents)), errors
    assert held_out["loss"] == pytest.approx(steered, abs=1e-5)
    assert held_out["bare_loss"] == pytest.approx(evaluate(make_host(), batches), abs=1e-5)
    assert held_out["low"] < held_out["difference"] < held_out["high"] < 0

    some = tmp_path / "some.jsonl"  # of one row the prompt alone is longer than what is read
    long = {"prompt": "w1 " * 40, "answer": "w11", "group": "d99"}
    some.write_text((place / "rows.jsonl").read_text() + json.dumps(long) + "\n")
    code, text, errors = run("eval", place / "host", out, some, "--batch", "5", "--most-tokens", "20", "--json")
    assert (
        code == 0 and json.loads(text)["held_out"]["documents"] == 16 and "1 rows are left out, the first: " in errors
    )

    code, text, errors = run("inspect", out, "--model", place / "host", "--text", "w1 w20 w3 w11", "--json")
    shown = json.loads(text)
    assert code == 0 and [token["token"] for token in shown["tokens"]] == ["w1", "w20", "w3", "w11"], errors
    assert shown["trainable"] == told["trainable"] == shown["of_controller"] + shown["of_updates"]
    assert all(len(token["code"]) == 2 and 0 < token["confidence"] < 1 for token in shown["tokens"])
    code, text, errors = run("inspect", out, "--model", place / "host", "--text", "w1 w20 w3 w11")
    assert code == 0 and "o of 2 layers (0 to 1), down of 2 layers (0 to 1)" in text and "w20" in text, errors
    assert "…" not in text  # a pipe has 80 columns
    for token, line in zip(shown["tokens"], text.splitlines()[-4:], strict=True):
        assert line.split()[:2] == [token["token"], token["level"]] and line.endswith(f" {token['confidence']:.2f}")

    lora = tmp_path / "lora"
    code, text, errors = run(
        "distil", place / "host", out, place / "rows.jsonl", "--out", lora, "--steps", "30", "--batch", "8", "--json"
    )
    assert code == 0 and json.loads(text)["modules"] == 4 and 0 < json.loads(text)["fitted_loses"] < 1, errors
    assert 0 < json.loads(text)["trained_loss"] < 1
    from peft import PeftModel

    static = PeftModel.from_pretrained(make_host(), lora)
    with torch.no_grad():
        theirs = static(batches[0]["input_ids"], attention_mask=batches[0]["attention_mask"]).logits
        bare = make_host()(batches[0]["input_ids"], attention_mask=batches[0]["attention_mask"]).logits
    at = batches[0]["labels"] != -100  # it was trained there
    assert float((theirs - says)[at].abs().mean()) < 0.5 * float((bare - says)[at].abs().mean())


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT asks
def test_lora_beside_an_adapter_is_as_large_and_measured_as_peft_would(place, run, words, tmp_path):
    out, rows = tmp_path / "adapter", place / "rows.jsonl"
    code, text, errors = run("train", place / "host", rows, "--out", out, *SMALL, "--lr", "0.02", "--json")
    told, lessons = json.loads(text), lessons_of(place, words)[0]
    batches = list(make_batches(lessons, 4, 0))
    assert code == 0, errors
    per_rank = told["lora"]["trainable"] / round(told["lora"]["trainable"] / told["trainable"])  # numbers of a rank
    assert abs(told["lora"]["trainable"] - told["trainable"]) <= per_rank and told["lora"]["loss"] < 3
    assert told["at_limits"] == {"train": None, "test": None}  # there are none by default
    assert {len(one["wanted"].split()) for one in told["answers"]} == {4} and len(told["answers"]) == 2
    assert all({"prompt", "adapter", "LoRA"} <= set(one) for one in told["answers"])
    code, text, errors = run("eval", place / "host", out, rows, "--batch", "5", "--json")
    held_out, beside = (json.loads(text)[name] for name in ("held_out", "lora"))
    from peft import PeftModel

    as_peft = PeftModel.from_pretrained(make_host(), out / "lora")
    assert beside["loss"] == pytest.approx(evaluate(as_peft.get_base_model(), batches), abs=1e-5)
    assert beside["adapter_minus_lora"]["difference"] == pytest.approx(held_out["loss"] - beside["loss"])
    code, text, errors = run("eval", place / "host", out, place / "rows.jsonl", "--batch", "5")
    better = "the adapter" if beside["adapter_minus_lora"]["high"] < 0 else "a LoRA of its size"
    shown = beside["adapter_minus_lora"]["low"] * beside["adapter_minus_lora"]["high"] > 0
    assert text.startswith(f"{better} is better than" if shown else "neither is shown to be better"), text
    assert f"{abs(beside['adapter_minus_lora']['difference']):.4f} nats a label" in text.splitlines()[0]


def test_training_killed_three_times_ends_bit_identical(place, run, tmp_path):
    """By SIGKILL, at any moment: between checkpoints, or while one is written."""
    rest = [*SMALL, "--epochs", "3", "--evaluate-every", "2"]

    def arguments(out):
        return ["train", place / "host", place / "rows.jsonl", "--out", out, *rest]

    seen: set[str] = set()
    for _ in range(3):
        child = os.fork()
        if not child:
            sys.argv = ["probemon", "bem", *map(str, arguments(tmp_path / "killed"))]
            with (
                open(os.devnull, "w") as sys.stdout,
                open(os.devnull, "w") as sys.stderr,
                contextlib.suppress(SystemExit),
            ):
                command_line.main()
            os._exit(0)
        # The state is what is written last of a checkpoint.
        while not (new := {str(path) for path in (tmp_path / "killed").glob("checkpoint-*/trainer_state.json")} - seen):
            assert os.waitpid(child, os.WNOHANG) == (0, 0)
            time.sleep(0.001)
        seen |= new
        os.kill(child, signal.SIGKILL)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    code, ended, errors = run(*arguments(tmp_path / "killed"))
    assert code == 0 and "going on from step " in errors, errors
    code, whole, errors = run(*arguments(tmp_path / "whole"))
    assert code == 0 and "going on" not in errors, errors
    ours, theirs = (load_file(tmp_path / name / "bem.safetensors") for name in ("killed", "whole"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert (tmp_path / "killed/training.json").read_text() == (tmp_path / "whole/training.json").read_text()
    assert ended.replace(str(tmp_path / "killed"), str(tmp_path / "whole")) == whole


def interrupt(*_):
    raise KeyboardInterrupt


def test_kill_within_the_lora_beside_it_keeps_the_adapter_and_ends_bit_identical(place, run, tmp_path, monkeypatch):
    train = ["train", place / "host", place / "rows.jsonl", *SMALL, "--epochs", "2", "--evaluate-every", "2", "--out"]
    code, whole, errors = run(*train, tmp_path / "whole")
    assert code == 0, errors
    with monkeypatch.context() as patch:
        patch.setattr(LoraBeside, "save", interrupt)
        run(*train, tmp_path / "cut")
    assert (tmp_path / "cut/unfinished.json").exists() and (tmp_path / "cut/bem.safetensors").exists()
    code, ended, errors = run(*train, tmp_path / "cut")
    assert code == 0 and ended.replace(str(tmp_path / "cut"), str(tmp_path / "whole")) == whole, errors
    ours, theirs = (load_file(tmp_path / name / "lora/adapter_model.safetensors") for name in ("cut", "whole"))
    assert set(ours) == set(theirs) and all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_limits_that_hold_most_updates_are_told_with_a_remedy(place, run, tmp_path):
    tight = ["--set", "spectral_cap=0.001", "--epochs", "1", "--no-lora", "--out", tmp_path / "adapter"]
    code, text, errors = run("train", place / "host", place / "rows.jsonl", *SMALL, *tight)
    assert code == 0 and "--set spectral_cap=null" in text and "LoRA" not in text, errors
    [share] = {line.split()[2] for line in text.splitlines() if line.startswith("limits hold ") and "train" in line}
    lessons, _ = lessons_of(place, tokenizer())
    with attach_bem(make_host(), tmp_path / "adapter") as bem:
        batches = list(make_batches(lessons, 4, 0))
        n_limited = n_updates = 0
        for batch in batches:  # by singular values of each token's update
            with torch.no_grad(), recorded_codes(bem) as recorded:
                bem.host(batch["input_ids"], attention_mask=batch["attention_mask"])
            for site in bem.sites:
                update = bem.updates[site.key]
                for code in codes_taken(bem, recorded[-1])[site.chunked][batch["attention_mask"] != 0]:
                    dense = bem.config.scale * update.U * code @ update.V.T
                    n_limited += bool(torch.linalg.matrix_norm(dense, 2) > 0.001 * (1 + 1e-4))
                    n_updates += 1
        assert share_at_limits(bem, batches) == pytest.approx(n_limited / n_updates, abs=0.01)
    assert 50 < int(share) <= 100


def test_early_stopping_keeps_the_best_parameters(place, run, tmp_path):
    """At a learning rate at which the loss on what chooses soon rises again."""
    out = tmp_path / "adapter"
    how = ["--epochs", "60", "--lr", "0.3", "--kl", "0", "--evaluate-every", "1", "--patience", "4"]
    code, text, errors = run("train", place / "host", place / "rows.jsonl", "--out", out, *SMALL, *how, "--json")
    told, record = json.loads(text), json.loads((out / "training.json").read_text())
    assert code == 0, errors
    chosen_by = [loss for _, loss in record["chosen_by"]]
    best = min(range(len(chosen_by)), key=chosen_by.__getitem__)
    assert told["stopped_early"] and told["n_steps"] == len(record["losses"]) == best + 5 < 360
    assert told["best_step"] == best and told["best_loss"] == chosen_by[best]
    assert sorted(path.name for path in out.iterdir()) == ["bem.json", "bem.safetensors", "lora", "training.json"]


def test_nonfinite_loss_ends_training(place, run, tmp_path):
    how = ["--epochs", "60", "--lr", "1e30", "--evaluate-every", "1"]
    code, _, errors = run("train", place / "host", place / "rows.jsonl", "--out", tmp_path / "adapter", *SMALL, *how)
    assert code == 2 and "the loss is nan: lower lr" in errors, errors


def test_an_unfinished_training_of_other_data_or_settings_is_refused(place, run, tmp_path, monkeypatch):
    out, rows = tmp_path / "adapter", tmp_path / "rows.jsonl"
    rows.write_text((place / "rows.jsonl").read_text())
    train = ["train", place / "host", rows, "--out", out, *SMALL, "--evaluate-every", "2"]
    with monkeypatch.context() as patch:
        patch.setattr(
            "probemon.adapters.bem.attached.Bem.save_pretrained", lambda *_: os.kill(os.getpid(), signal.SIGINT)
        )
        run(*train)
    assert (out / "unfinished.json").exists()
    for other in (["--lr", "0.02"], ["--kl", "0"], ["--patience", "6"], ["--set", "ema=0.25"]):
        code, _, errors = run(*train, *other)
        assert code == 2 and "has a training of other data, settings, model or adapter" in errors, errors
    rows.write_text(rows.read_text().replace("w12", "w13"))
    code, _, errors = run(*train)
    assert code == 2 and "has a training of other data" in errors
    rows.write_text((place / "rows.jsonl").read_text())
    (out / "checkpoint-99").mkdir()
    (out / "checkpoint-99/trainer_state.json").write_text('{"half')  # killed while it was written
    code, _, errors = run(*train)
    assert code == 0 and "going on from step " in errors, errors


def test_held_out_losses_equal_plain_cross_entropy(place, words):
    lessons, documents = lessons_of(place, words)
    bem = attach_bem(make_host(), BemConfig(rank=2, width=6))
    with torch.no_grad():
        for parameter in bem.parameters():
            parameter.add_(torch.randn_like(parameter) / 3)
        ours = measure(bem, list(make_batches(lessons[:7], 3, 0)), documents[:7])
        rows = []
        for lesson in lessons[:7]:
            logits = bem.host(torch.tensor([lesson.ids])).logits[0].double().log_softmax(dim=-1)
            rows += [-logits[t - 1, lesson.ids[t]] for t in range(1, len(lesson.ids)) if lesson.counted[t]]
    assert ours.adapter.labels.sum() == len(rows) and len(ours.adapter.sums) == 4
    assert ours.adapter.loss == pytest.approx(float(torch.stack(rows).mean()), abs=1e-6)
    batches = list(make_batches(lessons[:7], 3, 0))
    for wrong in (documents[:6], documents[:8]):  # a row more or less would be left out
        with pytest.raises(ConfigError, match=f"{len(wrong)} documents for 7 rows"):
            measure(bem, batches, wrong)
    with pytest.raises(ConfigError, match="has input_ids, attention_mask and no labels"):
        measure(bem, [{name: x for name, x in batches[0].items() if name != "labels"}], documents[:3])


def test_documents_are_split_whole_and_every_part_has_one():
    documents = [0, 0, 1, 2, 2, 2, 3, 4]
    parts = split(documents, {"train": 0.6, "choose": 0.1, "test": 0.3}, seed=3)
    of = {name: {documents[i] for i in rows} for name, rows in parts.items()}
    assert all(of.values()) and sorted(i for rows in parts.values() for i in rows) == list(range(8))
    assert not of["train"] & of["choose"] and not of["train"] & of["test"] and not of["choose"] & of["test"]
    with pytest.raises(ConfigError, match="there are 2 documents"):
        split([0, 1, 1], {"train": 0.6, "choose": 0.1, "test": 0.3}, seed=0)


def test_text_begins_as_the_tokenizer_or_chat_template_begins_it(words, monkeypatch):
    encode = type(words).__call__

    def with_bos(self, text, add_special_tokens=True, **more):
        encoded = encode(self, text, add_special_tokens=False, **more)
        return {"input_ids": [1, *encoded["input_ids"]] if add_special_tokens else encoded["input_ids"]}

    monkeypatch.setattr(type(words), "__call__", with_bos)
    for template, begun in ((None, 1), ("{{ messages[0].content }}", 0)):
        words.chat_template = template
        text, answer = ({"text": "w3 w2"}, {"prompt": "w3", "answer": "w2"})
        assert make_lesson(text, "row", words).ids == tuple(words("w3 w2")["input_ids"])
        if begun:
            assert make_lesson(answer, "row", words).ids[0] == 1
    words.chat_template = None


def test_mixed_row_types_are_refused_and_table_groups_match_jsonl(tmp_path):
    with pytest.raises(ConfigError, match="row has 'prompt' and 'text': give one of them"):
        check_row({"prompt": "a", "answer": "b", "text": "c"}, "row")
    for empty in ("", None, float("nan")):  # of a table
        assert check_row({"prompt": "a", "answer": "b", "text": empty}, "row") == "answer"
    lines = [{"text": "one", "group": 1}, {"text": "two", "group": 1.0}, {"text": "three", "group": ""}]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in [*lines, {"text": "four", "group": ""}]))
    assert read_bem_rows([path]).documents == [0, 0, 1, 2]


def test_only_assistant_turns_of_a_chat_count(words):
    turns = "{% for m in messages %}{{ m.role[0] }} {{ m.content }} ; {% endfor %}"
    words.chat_template = turns + "{% if add_generation_prompt %}a {% endif %}"
    chat = [("user", "w1 w2"), ("assistant", "w3"), ("user", "w4"), ("assistant", "w5 w6")]
    row = {"messages": [{"role": role, "content": content} for role, content in chat]}
    lesson = make_lesson(row, "row", words)
    words.chat_template = None
    counted = [words.decode([id]) for id, counts in zip(lesson.ids, lesson.counted, strict=True) if counts]
    assert [word for word in counted if word.startswith("w")] == [
        "w3",
        "w0",
        "w5",
        "w6",
        "w0",
    ]  # w0: the template's ";"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["train", "nowhere", "{rows}", "--out", "{out}", "--rank", "0"], "rank is 0: give 1 to 4096"),
        (["train", "nowhere", "{rows}", "--out", "{out}", "--layers", "3-1"], "--layers is '3-1'"),
        (["train", "nowhere", "{rows}", "--out", "{out}", "--budget", "200%"], "--budget is '200%'"),
        (["train", "nowhere", "{rows}", "--out", "{out}", "--budget", "9", "--set", "width=8"], "leave --set width"),
        (["train", "nowhere", "{rows}", "--out", "{out}", "--set", "sights=1"], "there is no setting 'sights'"),
        (["train", "nowhere", "{rows}", "--out", "{out}", "--form", "film", "--set", "bound"], "--set is 'bound'"),
        (["train", "nowhere", "{bad}", "--out", "{out}"], "line 1 has no answer"),
        (["train", "nowhere", "{few}", "--out", "{out}"], "there is 1 document (texts"),
        (["train", "nowhere", "{rows}", "--out", "{full}"], "is not an unfinished training"),
        (["eval", "nowhere", "{full}", "{rows}"], "has no bem.json"),
        (["distil", "nowhere", "{full}", "{rows}", "--out", "{out}", "--labels", "1"], "give --steps too"),
        (["inspect", "{full}"], "has no bem.json"),
        (["inspect", "{rows}"], "it is not a saved adapter"),
        (["inspect", "{full}", "--text", "w1"], "give --model too"),
    ],
)  # fmt: skip
def test_errors_are_one_line_before_a_model_is_loaded(place, run, tmp_path, arguments, says):
    (tmp_path / "full").mkdir()
    (tmp_path / "full/else.txt").write_text("mine")
    (tmp_path / "bad.jsonl").write_text(json.dumps({"prompt": "w1"}) + "\n")
    (tmp_path / "few.jsonl").write_text(json.dumps({"text": "w1 w2"}) + "\n")
    names = {"rows": place / "rows.jsonl", "out": tmp_path / "out", "full": tmp_path / "full"}
    names |= {"bad": tmp_path / "bad.jsonl", "few": tmp_path / "few.jsonl"}
    code, text, errors = run(*(argument.format(**names) for argument in arguments))
    assert code == 2 and text == "" and errors.count("\n") == 1 and says in errors, errors
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("how", "says", "rank"),
    [
        (["--level", "learned"], "low_rank of rank 2 for", 2),
        (["--level", "energy"], "low_rank of rank 2 for", 2),
        (["--form", "kronecker", "--set", "terms=1"], "kronecker of 1 term for", 16),
        (["--form", "head_groups", "--sites", "o", "--set", "groups=2"], "of rank 2 in each of 2 groups for", 4),
        (["--form", "rank_mask", "--set", "active=1"], "rank_mask of rank 2, 1 of them active for", 2),
        (["--form", "film"], "film of rank 2 for", None),
    ],
    ids=lambda value: value[1] if isinstance(value, list) else "",
)
def test_every_form_and_level_is_trained_inspected_and_distilled(place, run, tmp_path, how, says, rank):
    out, host = tmp_path / "adapter", place / "host"
    code, text, errors = run("train", host, place / "rows.jsonl", "--out", out, *SMALL, "--epochs", "1", *how)
    assert code == 0 and says.removesuffix(" for") in text, errors
    code, text, errors = run("inspect", out, "--model", host, "--text", f"w1 w20 {'w3' * 40} w11")
    assert code == 0 and says in text and "…" not in text, errors
    code, text, errors = run("inspect", out, "--model", host, "--text", "w1 w20 w3 w11", "--json")
    told = json.loads(text)
    assert told["trainable"] == sum(tensor.numel() for tensor in load_file(out / "bem.safetensors").values())
    chosen = attach_bem(make_host(), out).levels
    levels = set(LEVELS if chosen is None else chosen.chosen().values())
    assert {token["level"] for token in told["tokens"]} <= levels
    for cut in ([], ["--rank", "1"]):
        lora = tmp_path / f"lora{len(cut)}"
        code, text, errors = run("distil", host, out, place / "rows.jsonl", "--out", lora, *cut, "--json")
        if rank is None:
            assert code == 2 and "so it has no LoRA" in errors and "loaded" not in errors
            continue
        assert code == 0 and json.loads(text)["rank"] == (1 if cut else rank), errors
