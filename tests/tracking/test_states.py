"""A tapped module must give one hidden state per token, of the pack's width, once per forward; else an error."""

import copy

import pytest
import torch

from conftest import HIDDEN, make_model, make_pack, n_hooks
from corpora import make_tokenizer, random_texts
from probemon import DynamicProbeManager
from probemon.errors import AlignmentError, ProbemonError, UnsupportedModel
from probemon.host.internals import CACHE_NAME
from probemon.monitor.sinks import MemorySink

PROMPT = torch.tensor([[1, 5, 9, 13, 7], [1, 4, 8, 3, 6]])
GREEDY = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
BENDS = {
    "narrower": lambda h: h[..., : HIDDEN // 2].contiguous(),
    "one value": lambda h: h[..., :1],
    "wider": lambda h: torch.cat([h, h], -1),
    "several streams": lambda h: h[:, :, None].expand(-1, -1, 4, -1),
    "streams side by side": lambda h: h.repeat(1, 1, 4),
    "rows joined": lambda h: h.reshape(-1, h.shape[-1]),
    "rows and tokens exchanged": lambda h: torch.cat([h, h], 1).transpose(0, 1),
    "a token too few": lambda h: h[:, 1:],
    "a token too many": lambda h: torch.cat([h, h[:, -1:]], 1),
    "a row too many": lambda h: torch.cat([h, h[:1]]),
    "whole numbers": lambda h: h.long(),
    "complex numbers": lambda h: torch.complex(h, h),
    "no tensor": lambda h: {"hidden": h},
    "nothing": lambda h: None,
    "an empty tuple": lambda h: (),
}


class Bent(torch.nn.Module):
    """A layer that gives something else than its states, from its `first` forward on."""

    def __init__(self, inner, bend, first=0):
        super().__init__()
        self.inner, self.bend, self.wait = inner, bend, first

    def forward(self, hidden, *args, **kwargs):
        self.whole = self.inner(hidden, *args, **kwargs)
        self.wait -= 1
        return self.bend(self.whole) if self.wait < 0 else self.whole


class Straight(torch.nn.Module):
    """The layer after it, which knows better."""

    def __init__(self, inner, before):
        super().__init__()
        self.inner, self.before = inner, [before]

    def forward(self, hidden, *args, **kwargs):
        return self.inner(self.before[0].whole, *args, **kwargs)


class Again(torch.nn.Module):
    """A layer after which another one is run once more, from its `first` forward on: a stack that loops."""

    def __init__(self, inner, other, first=0):
        super().__init__()
        self.inner, self.other, self.wait = inner, [other], first

    def forward(self, hidden, *args, **kwargs):
        self.wait -= 1
        hidden = self.inner(hidden, *args, **kwargs)
        return self.other[0](hidden, *args, **{**kwargs, CACHE_NAME: None}) if self.wait < 0 else hidden


def bent(bend, first=0):
    host = make_model()
    layers = host.model.layers
    layers[1] = Bent(layers[1], BENDS[bend], first)
    layers[2] = Straight(layers[2], layers[1])
    return host


def looping(first=0):
    host = make_model()
    host.model.layers[2] = Again(host.model.layers[2], host.model.layers[1], first)
    return host


def pack_of(folder, *sites):
    """The same probes for every host of the tests: their layers have other names, not other weights."""
    return make_pack(folder / "pack", make_model(), sites=sites or ("resid_post.1",), score_rule="independent")


def refused(manager, make_host, error, words, *, first=0):
    """Whoever runs the host, `error` comes at its forward number `first`, of which no token is scored, recorded, told
    or acted on.
    """
    told, memory = [], MemorySink()
    for generates in (True, False):
        host = make_host()
        with manager.attach(host) as run:
            if generates:
                run.on("c0", above=0.0, action=told.append)
            run.follow(memory)
            with torch.no_grad(), pytest.raises(error, match=words):
                for _ in range(first + 1):
                    host.generate(PROMPT, **GREEDY) if generates else host(PROMPT)
        columns = [int(placed.columns.max()) for recording in run.recordings for placed in recording.placed]
        assert columns == ([4, 5, 6][:first] if generates else [4] * first)
    assert first or not (told or memory.batches)


@pytest.fixture(autouse=True)
def weights_of_a_changed_host():
    with pytest.warns(UserWarning, match="this model's weights are others"):
        yield


@pytest.mark.parametrize("bend", BENDS)
def test_unsuitable_hidden_states_are_refused_wherever_they_are_scored(bend, tmp_path):
    manager, host = DynamicProbeManager(pack_of(tmp_path)), bent(bend)
    hooks = n_hooks(host)
    refused(manager, lambda: host, UnsupportedModel, r"resid_post\.1 gives")
    with pytest.raises(UnsupportedModel, match=r"resid_post\.1 gives"):
        manager.analyze(host, make_tokenizer(), random_texts(3), tmp_path / "out")
    assert n_hooks(host) == hooks


@pytest.mark.parametrize("impl", ["cpu", "numba", "reference"])
@pytest.mark.parametrize("bend", ["narrower", "wider", "one value"])
def test_no_kernel_gets_hidden_states_of_another_width(bend, impl, tmp_path):
    manager = DynamicProbeManager(pack_of(tmp_path), impl=impl)
    refused(manager, lambda: bent(bend), UnsupportedModel, "values a token, the pack reads 16")


@pytest.mark.parametrize("bend", ["narrower", "several streams", "a token too many"])
def test_hidden_states_that_change_during_a_generation_are_refused(bend, tmp_path):
    manager = DynamicProbeManager(pack_of(tmp_path))
    refused(manager, lambda: bent(bend, first=2), UnsupportedModel, r"resid_post\.1 gives", first=2)


@pytest.mark.parametrize(
    "sites", [("resid_post.1",), ("resid_post.1", "resid_post.2"), ("resid_post.0", "resid_post.1")], ids=str
)
@pytest.mark.parametrize("first", [0, 2])
def test_layer_that_runs_twice_in_a_forward_is_refused(sites, first, tmp_path):
    manager = DynamicProbeManager(pack_of(tmp_path, *sites))
    refused(manager, lambda: looping(first), AlignmentError, r"resid_post\.1 was run twice", first=first)
    if not first:
        with pytest.raises(AlignmentError, match=r"resid_post\.1 was run twice"):
            manager.analyze(looping(), make_tokenizer(), random_texts(3), tmp_path / "out")


@pytest.mark.parametrize("site", ["resid_post.1", "resid_post.2", "mlp_out.0", "attn_out.2"])
def test_layers_that_share_a_module_are_refused_when_attached(site, tmp_path):
    host = make_model()
    layers = host.model.layers
    layers[2].self_attn, layers[0].mlp = layers[1].self_attn, layers[1].mlp
    layers[2] = layers[1] if site.startswith("resid_post") else layers[2]
    hooks, manager = n_hooks(host), DynamicProbeManager(pack_of(tmp_path, site))
    with pytest.raises(UnsupportedModel, match="share one module"):
        manager.attach(host)
    with pytest.raises(UnsupportedModel, match="share one module"):
        manager.analyze(host, make_tokenizer(), random_texts(2), tmp_path / "out")
    assert n_hooks(host) == hooks
    with (
        DynamicProbeManager(make_pack(tmp_path / "other", host, sites=("resid_post.0",))).attach(host) as run,
        torch.no_grad(),
    ):
        host(PROMPT, use_cache=False)  # what runs once is read, whatever else is shared
    assert run.result(PROMPT).coverage.seen.all()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("bend", ["narrower", "one value", "wider", "several streams"])
def test_compiled_model_is_refused_in_the_same_way(bend, tmp_path):
    torch._dynamo.reset()
    host = bent(bend)
    host.forward = torch.compile(host.forward, backend="eager")
    with torch.no_grad(), DynamicProbeManager(pack_of(tmp_path)).attach(host) as run, pytest.raises(ProbemonError):
        host(PROMPT, use_cache=False)
    assert not any(recording.n_entries for recording in run.recordings)
    torch._dynamo.reset()


def test_model_is_scored_again_after_a_refused_forward(tmp_path):
    """The check leaves nothing behind in the run: the next forward, of states that fit, is scored as ever."""
    manager, host = DynamicProbeManager(pack_of(tmp_path)), bent("narrower")
    with torch.no_grad(), manager.attach(host) as run:
        with pytest.raises(UnsupportedModel):
            host(PROMPT)
        host.model.layers[1].bend = lambda hidden: hidden
        host(PROMPT)
    straight = copy.deepcopy(host)
    with torch.no_grad(), manager.attach(straight) as other:
        straight(PROMPT)
    mine, oracle = run.result(PROMPT), other.result(PROMPT)
    assert mine.coverage.seen.all() and all(
        (mine.scores.active_scores(i) == oracle.scores.active_scores(i)).all() for i in range(10)
    )
