"""Stored states equal a forward, token by token; a killed collection resumes to the same bytes."""

import hashlib
import json
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from conftest import make_model
from corpora import make_tokenizer, random_texts
from oracle import states as forward_states
from probemon.errors import TrainingError
from probemon.lab.corpora import windows
from probemon.lab.corpora.windows import Reading, Window
from probemon.lab.training.state_store import StatePlan, TextReader, collect_states, drawn_evenly, held
from probemon.lab.training.texts import Text

SITES = ("resid_post.0", "resid_post.2")


@pytest.fixture(scope="module")
def texts():
    plain = [Text(f"text {i}", text) for i, text in enumerate(random_texts(40, seed=1))]
    # Chats hold the special tokens of their template.
    return [*plain[:30], Text("chat", "<s>whale sings", ((3, 8),), is_chat=True), *plain[30:]]


def plan_of(model, texts, every=1, sites=SITES):
    reader = TextReader(model, make_tokenizer(), sites, Reading(Window(32, 8)))
    tokens = reader.tokens(texts)
    return StatePlan(reader, texts, tokens, [np.arange(0, len(own), every) for own in tokens])


def everything(store, site):
    return store.states(site)[torch.arange(len(store.document))]


def digest(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def test_rows_are_the_states_of_their_tokens(model, texts, tmp_path):
    plan = plan_of(model, texts)
    store = collect_states(plan, tmp_path / "s")
    assert len(store.document) == plan.n_rows == sum(map(len, plan.tokens))
    for i in (0, 7, 30, 35):
        tokens = plan.tokens[i]
        rows = np.flatnonzero(store.document == i)
        assert store.position[rows].tolist() == list(range(len(tokens))) and rows[0] == store.first[i]
        if len(tokens) < 32:
            found = forward_states(model, SimpleNamespace(sites=SITES), [*tokens.prefix, *tokens.ids.tolist()])
            for site in SITES:
                wanted = found[site][len(tokens.prefix) :]
                torch.testing.assert_close(store.states(site)[torch.from_numpy(rows)], wanted, rtol=1e-5, atol=1e-5)
    # Anybody reads the files.
    assert torch.equal(
        load_file(tmp_path / "s" / "resid_post.2.safetensors")["states"], everything(store, "resid_post.2")
    )


def test_a_chat_is_read_with_its_own_special_tokens(model, texts):
    plan = plan_of(model, texts)
    tokens = plan.tokens[30]
    assert (tokens.prefix, int(tokens.ids[0])) == ((), 1) and plan.tokens[0].prefix == (1,)
    assert np.flatnonzero(texts[30].counts(tokens)).tolist() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("after", [1, 4])
def test_killed_collection_resumes_to_the_same_bytes(model, texts, tmp_path, monkeypatch, after):
    monkeypatch.setattr(windows, "SHARD_DOCUMENTS", 8)
    plan = plan_of(model, texts, every=3)
    collect_states(plan, tmp_path / "whole")
    calls, real = [], plan.reader.plain.run

    def dying(*arguments):
        calls.append(1)
        if len(calls) > after:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(plan.reader.plain, "run", dying)
    with pytest.raises(KeyboardInterrupt):
        collect_states(plan, tmp_path / "killed")
    done = json.loads((tmp_path / "killed" / "states.json").read_text())
    assert 0 < done["texts"] < len(texts)
    with (tmp_path / "killed" / "resid_post.0.safetensors").open("ab") as stream:
        stream.write(b"half a row")
    n_before = len(calls)
    monkeypatch.setattr(plan.reader.plain, "run", lambda *arguments: (calls.append(1), real(*arguments))[1])
    store = collect_states(plan_again(plan), tmp_path / "killed")
    assert digest(tmp_path / "killed") == digest(tmp_path / "whole")
    assert len(calls) > n_before
    n_before = len(calls)
    again = collect_states(plan, tmp_path / "killed")
    assert len(calls) == n_before + 1 and torch.equal(everything(again, SITES[0]), everything(store, SITES[0]))


def plan_again(plan):
    return StatePlan(plan.reader, plan.texts, plan.tokens, plan.kept)


def test_states_of_another_model_or_damaged_files_are_read_again(model, texts, tmp_path):
    collect_states(plan_of(model, texts), tmp_path / "s")
    before = digest(tmp_path / "s")
    other = make_model(seed=1)
    collect_states(plan_of(other, texts), tmp_path / "s")
    assert digest(tmp_path / "s")["resid_post.0.safetensors"] != before["resid_post.0.safetensors"]
    collect_states(plan_of(model, texts), tmp_path / "s")
    assert digest(tmp_path / "s") == before
    (tmp_path / "s" / "resid_post.2.safetensors").write_bytes(b"cut")
    collect_states(plan_of(model, texts), tmp_path / "s")
    assert digest(tmp_path / "s") == before
    model = make_model()
    with torch.no_grad():  # one value of many
        model.model.layers[1].mlp.up_proj.weight[3, 5] += 0.5
    collect_states(plan_of(model, texts), tmp_path / "s")
    changed = digest(tmp_path / "s")
    assert changed["resid_post.2.safetensors"] != before["resid_post.2.safetensors"]
    # What no key says: something steers the host.
    handle = model.model.layers[0].register_forward_hook(lambda _, given, out: out + 0.05)
    collect_states(plan_of(model, texts), tmp_path / "s")
    assert digest(tmp_path / "s")["resid_post.0.safetensors"] != changed["resid_post.0.safetensors"]
    handle.remove()
    collect_states(plan_of(model, texts), tmp_path / "s")
    unsteered = digest(tmp_path / "s")["resid_post.2.safetensors"]
    handle = model.model.layers[0].register_forward_hook(
        lambda _, given, out: out + 0.002 * out.norm(dim=-1, keepdim=True) * torch.eye(out.shape[-1])[3]
    )
    collect_states(plan_of(model, texts), tmp_path / "s")
    assert digest(tmp_path / "s")["resid_post.2.safetensors"] != unsteered
    handle.remove()
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "to.txt").write_text("dear")
    with pytest.raises(TrainingError, match="holds other files than states"):
        collect_states(plan_of(model, texts), tmp_path / "letters")


def test_second_run_on_the_same_folder_is_refused(tmp_path):
    """The other is a process, as it would be: what it holds goes with it."""
    wait = "import sys, time\nfrom probemon.lab.training.state_store import held\n"
    wait += "with held(sys.argv[1]):\n    print(flush=True)\n    time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", wait, str(tmp_path / "s")], stdout=subprocess.PIPE) as other:
        assert other.stdout.readline()
        with (
            pytest.raises(TrainingError, match=r"another run works with the states in .*: wait for it"),
            held(tmp_path / "s"),
        ):
            pass
        # Of folders that several trainings share, such as that of ordinary text, the second run waits.
        with pytest.raises(TrainingError, match="another run"), held(tmp_path / "s", waiting=list, seconds=0.3):
            pass
        waited = []
        with held(tmp_path / "s", waiting=lambda: waited.append(other.kill())):
            assert len(waited) == 1
    with held(tmp_path / "s"):
        assert not list((tmp_path / "s").iterdir())
    (tmp_path / "file").touch()
    with pytest.raises(TrainingError, match="file cannot hold states"), held(tmp_path / "file"):
        pass


def test_it_is_said_whether_kept_states_are_used_or_why_not(model, texts, tmp_path):
    said = []
    collect_states(plan_of(model, texts), tmp_path / "s", say=said.append)
    assert said == []
    collect_states(plan_of(model, texts), tmp_path / "s", say=said.append)
    assert said.pop() == f"states of {len(texts)} of {len(texts)} texts are taken from {tmp_path / 's'}"
    anew = f"states in {tmp_path / 's'} are read anew: "
    collect_states(plan_of(model, texts, sites=SITES[:1]), tmp_path / "s", say=said.append)
    assert said.pop().startswith(f"{anew}another") and not said
    collect_states(plan_of(model, texts[1:]), tmp_path / "s", say=said.append)
    assert "another text or tokens of it" in said.pop()
    (tmp_path / "s" / "resid_post.2.safetensors").write_bytes(b"cut")
    collect_states(plan_of(model, texts[1:]), tmp_path / "s", say=said.append)
    assert said.pop() == f"{anew}a file is shorter than stated"
    handle = model.model.layers[0].register_forward_hook(lambda _, given, out: out + 0.05)
    collect_states(plan_of(model, texts[1:]), tmp_path / "s", say=said.append)
    handle.remove()
    assert said.pop().startswith(f"{anew}the model gives other states now (at resid_post.0 by ")


def test_texts_outside_the_budget_are_not_read(model, texts, tmp_path, monkeypatch):
    whole = plan_of(model, texts)
    kept = [own if i % 3 else own[:0] for i, own in enumerate(whole.kept)]
    plan, read = StatePlan(whole.reader, whole.texts, whole.tokens, kept), []
    store = collect_states(plan, tmp_path / "s", progress=read.append)
    assert sum(read) == sum(len(own) for own in kept) and not (store.document % 3 == 0).any()
    every = collect_states(whole, tmp_path / "whole")
    for i in range(len(texts)):
        rows = torch.from_numpy(np.flatnonzero(store.document == i))
        same = torch.from_numpy(np.flatnonzero(every.document == i))[: len(rows)]
        torch.testing.assert_close(store.states(SITES[0])[rows], every.states(SITES[0])[same])


def test_tokens_under_a_budget_are_drawn_evenly_and_never_exceed_it():
    wanted = [np.arange(n) for n in (3, 0, 5, 1, 11)]
    counts = [np.zeros(len(own)) for own in wanted]
    for seed in range(2000):
        kept = drawn_evenly(wanted, row_bytes=10, budget=65, seed=seed)
        assert sum(map(len, kept)) == 6
        for count, own in zip(counts, kept, strict=True):
            count[own] += 1
    shares = np.concatenate(counts) / 2000
    assert np.abs(shares - 6 / 20).max() < 4 * (0.3 * 0.7 / 2000) ** 0.5
    everything = drawn_evenly(wanted, row_bytes=10, budget=10_000, seed=0)
    assert all(np.array_equal(own, all_of_it) for own, all_of_it in zip(everything, wanted, strict=True))
    assert sum(map(len, drawn_evenly(wanted, row_bytes=10, budget=9, seed=0))) == 0
