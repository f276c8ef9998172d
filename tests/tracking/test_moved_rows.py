"""Cached sequences that are moved, copied, dropped or written are followed, unseen or refused, never mixed up."""

import copy

import numpy as np
import peft
import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    DynamicCache,
    EncoderDecoderCache,
    Mamba2Config,
    MambaConfig,
    StaticCache,
)

from conftest import PAD, make_model, make_pack
from oracle import states
from probemon import DynamicProbeManager
from probemon.errors import AlignmentError
from probemon.ops.judges.escalations import last_ids
from probemon.tracking.recording import BEFORE, LAST

N_TRIALS = 12
PICTURE, NEW = 5, 3  # the token in whose place each row's own "picture" is read
SIZES = {
    "vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 128, "initializer_range": 0.5,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": PAD,
}  # fmt: skip
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
BART = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
        "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "decoder_start_token_id": 1,
        "forced_eos_token_id": None, "init_std": 0.5}  # fmt: skip
HOSTS = {
    "one layer": ("llama", {"num_hidden_layers": 1}, DynamicCache),
    "llama": ("llama", {}, DynamicCache),
    "static": ("llama", {}, StaticCache),
    "window": ("mistral", {"sliding_window": 4}, DynamicCache),
    "window, static": ("mistral", {"sliding_window": 4}, StaticCache),
    "mixed": ("gemma3_text", {"query_pre_attn_scalar": 8, **SLIDING}, DynamicCache),
    "recurrent": (
        "qwen3_next",
        {"layer_types": ["full_attention", "linear_attention"], "num_experts": 2, "num_experts_per_tok": 1,
         "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8, "linear_num_value_heads": 2,
         "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
        DynamicCache,
    ),
    "encoder": ("bart", BART, DynamicCache),
}  # fmt: skip


class Host:
    """A random model in which every row reads a picture of its own, and what is known of the rows of a batch."""

    def __init__(self, name, alone=None):
        self.alone, self.oracles = alone, {}
        kind, extra, self.cache_class = HOSTS[name]
        torch.manual_seed(0)
        config = AutoConfig.for_model(kind, **{**SIZES, **extra})
        auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
        self.model = auto.from_config(config).eval()
        # transformers repeats and selects rows of no other layers
        self.in_place = self.cache_class is StaticCache or name == "recurrent"
        self.encodes = config.is_encoder_decoder
        self.pictures = 3 * torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
        self.read = []
        if not self.encodes:
            self.model.get_input_embeddings().register_forward_hook(self._see)

    def _see(self, module, args, out):
        if self.read:
            shown = (args[0] == PICTURE)[..., None]
            return torch.where(shown, out + self.pictures[torch.tensor(self.read)][:, None], out)
        return out

    def encoder_ids(self, picture):
        return [7 + picture, 20 + picture]

    def new_cache(self):
        if self.encodes:
            return EncoderDecoderCache(DynamicCache(config=self.model.config), DynamicCache(config=self.model.config))
        if self.cache_class is StaticCache:
            return StaticCache(config=self.model.config, max_cache_len=60)
        return DynamicCache(config=self.model.config.get_text_config())

    def forward(self, ids, cache, mask, pictures):
        if self.encodes:
            encoder = torch.tensor([self.encoder_ids(picture) for picture in pictures])
            return self.model(input_ids=encoder, decoder_input_ids=ids, past_key_values=cache)
        return self.model(ids, past_key_values=cache, attention_mask=mask)

    def oracle(self, manager, ids, picture):
        """Scores of one row alone, by one plain forward without a cache, of another model that nobody watches."""
        if (ids, picture) not in self.oracles:
            self.alone.read = [picture]
            encoder = self.encoder_ids(picture) if self.encodes else None
            self.oracles[ids, picture] = manager.score_tokens(
                states(self.alone.model, manager.pack, list(ids), encoder)
            )
        return self.oracles[ids, picture]


@pytest.fixture(scope="module", params=HOSTS)
def watched(request, tmp_path_factory):
    host = Host(request.param, Host(request.param))
    sites = ("resid_post.0",) if host.model.config.num_hidden_layers == 1 or host.encodes else ("resid_post.1",)
    pack = make_pack(tmp_path_factory.mktemp("packs") / "random", host.model, sites=sites)
    return request.param, host, DynamicProbeManager(pack, keep_top_k=0)


def move(cache, op, draw, n_rows):
    """Do one thing to a cache, as transformers does it or by hand; return it, and which row each row was."""
    rows = np.arange(n_rows)
    if op == "select":
        rows = draw.integers(0, n_rows, draw.integers(1, n_rows + 2))
        cache.batch_select_indices(torch.from_numpy(rows))
    elif op == "reorder":
        rows = draw.permutation(n_rows)
        cache.reorder_cache(torch.from_numpy(rows))
    elif op == "repeat":
        rows = np.repeat(rows, 2)
        cache.batch_repeat_interleave(2)
    elif op == "copy":
        cache = copy.deepcopy(cache)
    elif op == "written":
        rows = draw.permutation(n_rows)
        for inner in (cache, *filter(None, [getattr(cache, "cross_attention_cache", None)])):
            for layer in getattr(inner, "self_attention_cache", inner).layers:
                for held in vars(layer).values():
                    for tensor in held.values() if isinstance(held, dict) else (held,):
                        if isinstance(tensor, torch.Tensor) and tensor.dim() > 2:
                            tensor.copy_(tensor[rows])
    return cache, rows


def run_turn(host, run, way, ids, mask, cache, pictures):
    """One turn of a batch; return the sequences `[B, L]` after it."""
    host.read = pictures
    # Without a mask transformers takes a 0 that was generated for padding.
    mask = torch.ones_like(ids) if mask is None else mask
    if way == "generate":
        return host.model.generate(
            ids,
            attention_mask=mask,
            past_key_values=cache,
            max_new_tokens=NEW,
            do_sample=False,
            eos_token_id=None,
        )
    at = int(cache.get_seq_length())
    if way == "document":
        host.forward(ids[:, at:], cache, mask, pictures)
        return ids
    with run.generating(from_column=ids.shape[1]) as loop:
        for _ in range(NEW):
            logits = host.forward(ids[:, at:], cache, mask, pictures).logits
            at, ids = ids.shape[1], torch.cat([ids, logits[:, -1:].argmax(-1)], 1)
            mask = torch.nn.functional.pad(mask, (0, 1), value=1)
            loop.sampled(ids)
    return ids


def check(host, manager, result, ids, mask, rows):
    """Every token that was seen has the scores of its own row; return how many were not, for which reasons."""
    reasons = []
    for i, (row, position) in enumerate(zip(result.row.tolist(), result.position.tolist(), strict=True)):
        if result.coverage.unseen[i]:
            reasons.append(result.coverage.unseen[i])
            continue
        first = 0 if mask is None else int((mask[row] == 0).sum())
        line = tuple(ids[row].tolist()[first:])
        oracle = host.oracle(manager, line, rows[row])
        mine, theirs = result.scores.take(np.array([i])), oracle.take(np.array([position - first]))
        assert mine.active(0).tolist() == theirs.active(0).tolist(), f"row {row}, position {position}"
        assert np.abs(mine.active_scores(0) - theirs.active_scores(0)).max(initial=0) < 1e-5, (row, position)
    return reasons


OPS = ("select", "reorder", "repeat", "copy", "written", "none")


def trial(host, manager, run, draw, padded):
    """Three turns on one cache whose rows are moved between them. Return, for each later turn, what was done to the
    cache before it ("" if it was refused) and whether all of its tokens were seen.
    """
    pictures = draw.integers(0, 4, draw.integers(1, 4)).tolist()
    ids, mask = torch.tensor([[1, PICTURE, 9, 13, 7]] * len(pictures)), None
    if host.encodes:
        ids = ids[:, :1]
    elif padded and draw.random() < 0.3:
        ids[0] = torch.tensor([PAD, PAD, 1, PICTURE, 9])
        mask = (ids != PAD).long()
    cache, op, told, kept = host.new_cache(), "", [], []
    for turn in range(3):
        ways = ["generate", "document", "by hand"] if mask is None else ["generate"]
        way = draw.choice(
            ways[1:] if host.encodes else ways
        )  # transformers' own second turn on a decoder's cache is wrong
        ids = run_turn(host, run, way, ids, mask, cache, pictures)
        if mask is not None:
            mask = torch.nn.functional.pad(mask, (0, ids.shape[1] - mask.shape[1]), value=1)
        result = run.result(ids, generation=run.recordings[-1].number)
        reasons = check(host, manager, result, ids, mask, pictures)
        if turn and set(reasons) <= {LAST}:  # what a judge is shown
            for row, line in enumerate(ids.tolist()):
                known, n_missing = last_ids(run.recordings[-1], row, len(line) - 2, 64)
                assert (list(known), n_missing) == (line[2 * (line[0] == PAD) : -1], 0)
        if turn:
            told.append((op, set(reasons) <= {LAST}))
            assert told[-1][1] or BEFORE in reasons
        if op == "written":
            return told
        op = str(draw.choice(OPS))
        kept.append(cache)  # a copy is told by what it was made of
        if host.in_place:
            op = {"select": "reorder", "repeat": "copy"}.get(op, op)
        cache, origin = move(cache, op, draw, len(pictures))
        pictures, ids = [pictures[i] for i in origin], ids[origin]
        more = torch.from_numpy(draw.integers(10, 60, (len(ids), 2)))
        ids = torch.cat([ids, more if draw.random() < 0.5 else more[:1].expand(len(ids), 2)], 1)
        if mask is not None:
            mask = torch.nn.functional.pad(mask[origin], (0, 2), value=1)
    return told


@pytest.mark.filterwarnings("ignore")  # some hosts warn of kernels that are not installed
def test_sequences_moved_between_turns_are_followed_or_unseen_never_mixed(watched):
    name, host, manager = watched
    followed, unseen = dict.fromkeys(OPS, 0), dict.fromkeys(OPS, 0)
    with manager.attach(host.model) as run, torch.no_grad():
        for seed in range(N_TRIALS):
            for op, whole in trial(host, manager, run, np.random.default_rng(seed), name in ("llama", "one layer")):
                (followed if whole else unseen)[op] += 1
    # What transformers does to a cache is followed; what was written over it is not known any more.
    assert not sum(n for op, n in unseen.items() if op != "written")
    assert followed["reorder"] and followed["copy"] and (followed["repeat"] or host.in_place)


@pytest.mark.parametrize("layers", [None, ["full_attention", "sliding_attention"]], ids=["llama", "windows deeper"])
@pytest.mark.parametrize("op", OPS)
def test_sequences_that_differ_only_after_the_last_cached_layer_are_never_mixed(tmp_path, layers, op):
    """As of adapters by row in the last layer alone: keys and values are the same, or only a window's differ."""
    name, at = ("llama", 1) if layers is None else ("mixed", 0)
    hosts = [Host(name), Host(name)]
    if layers is not None:
        for host in hosts:
            torch.manual_seed(0)
            config = copy.deepcopy(host.model.config)
            config.layer_types = layers
            host.model = AutoModelForCausalLM.from_config(config).eval()
    for host in hosts:
        host.model.model.layers[at].mlp.register_forward_hook(
            lambda module, args, out, host=host: out + host.pictures[torch.tensor(host.read)][:, None]
        )
    host = hosts[0]
    host.alone = hosts[1]
    manager = DynamicProbeManager(make_pack(tmp_path / "pack", host.model, sites=("resid_post.1",)), keep_top_k=0)
    ids, cache, draw = torch.tensor([[1, 8, 9, 13, 7]] * 3), host.new_cache(), np.random.default_rng(5)
    with manager.attach(host.model) as run, torch.no_grad():
        run_turn(host, run, "document", ids, None, cache, [0, 1, 1])
        kept = cache  # a copy is told by what it was made of
        cache, origin = move(cache, op, draw, 3)
        pictures, ids = [[0, 1, 1][i] for i in origin], torch.cat([ids[origin], ids[origin, :2]], 1)
        out = run_turn(host, run, "generate", ids, None, cache, pictures)
        reasons = check(host, manager, run.result(out), out, None, pictures)
    assert kept is not None and (set(reasons) <= {LAST, BEFORE} if op != "none" else set(reasons) == {LAST})


def test_cache_copy_is_recognised_by_the_positions_both_windows_hold(tmp_path):
    """Of a window of four the cache keeps three columns, and the original has gone on by one of them."""
    host = Host("window", Host("window"))
    manager = DynamicProbeManager(make_pack(tmp_path / "pack", host.model), keep_top_k=0)
    ids, cache = torch.tensor([[1, PICTURE, 9, 13, 7]] * 2), host.new_cache()
    with manager.attach(host.model) as run, torch.no_grad():
        run_turn(host, run, "document", ids, None, cache, [0, 1])
        early = copy.deepcopy(cache)
        early.reorder_cache(torch.tensor([1, 0]))
        run_turn(host, run, "document", torch.cat([ids, ids[:, -1:]], 1), None, cache, [0, 1])
        out = run_turn(host, run, "generate", torch.cat([ids, ids[:, :1]], 1), None, early, [1, 0])
    assert check(host, manager, run.result(out), out, None, [1, 0]) == [LAST, LAST]


@pytest.mark.filterwarnings(
    "ignore:.*is_gradient_checkpointing:FutureWarning", "ignore:.*adapters.*are active:UserWarning"
)
def test_sequences_with_their_own_adapters_are_followed_when_moved(tmp_path):
    """The ids of both rows are the same, and only the adapter of each tells them apart."""
    adapters = {"adapter_names": ["loud", "quiet"]}
    settings = {"max_new_tokens": 1, "do_sample": False, "eos_token_id": None}
    torch.manual_seed(0)
    lora = peft.LoraConfig(r=4, target_modules=["v_proj", "down_proj"], init_lora_weights=False)
    model = peft.get_peft_model(make_model(), lora, adapter_name="loud").eval()
    model.add_adapter("quiet", lora)
    manager = DynamicProbeManager(make_pack(tmp_path / "pack", make_model()), keep_top_k=0)
    ids = torch.tensor([[1, 5, 9, 13, 7]] * 2)
    for order in ([0, 1], [1, 0], [1, 1, 0]):
        cache = DynamicCache()
        names = [adapters["adapter_names"][row] for row in order]
        with manager.attach(model) as run:
            first = model.generate(input_ids=ids, past_key_values=cache, **settings, **adapters)
            before = run.result(first).scores
            cache.batch_select_indices(torch.tensor(order))
            second = model.generate(input_ids=first[order], past_key_values=cache, adapter_names=names, **settings)
        result = run.result(second)
        assert result.coverage.n_unseen == len(order)  # the newest token of each row
        for row, origin in enumerate(order):
            mine = result.scores.take(np.flatnonzero(result.row == row)[:5])
            theirs = before.take(np.arange(5) + 6 * origin)
            assert mine.values.tolist() == theirs.values.tolist(), (order, row)


def test_ids_of_moved_sequences_outlive_their_scores(tmp_path):
    model, cache = make_model(), DynamicCache()
    manager = DynamicProbeManager(make_pack(tmp_path / "pack", make_model()), keep_top_k=0)
    settings = {"past_key_values": cache, "do_sample": False, "eos_token_id": None}
    ids = torch.tensor([[1, 5, 9, 13, 7], [1, 8, 33, 6, 4]])
    with manager.attach(model, keep_tokens=6) as run:
        for n_new in (3, 2, 9):
            ids = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=n_new, **settings)
            if n_new < 9:
                cache.reorder_cache(torch.tensor([1, 0]))
                ids = ids[[1, 0]]
        newest = run.recordings[-1]
    assert newest.earlier.earlier is None and newest.earlier.forgotten > 8  # the first turn was let go of
    for row, line in enumerate(ids.tolist()):
        known, n_missing = last_ids(newest, row, 17, 18)
        assert list(known) == line[18 - len(known) : 18] and len(known) + n_missing == 18
        assert len(known) > 11  # of the first turn, too: the later ones have ten


@pytest.mark.parametrize("change", ["moved", "written"])
def test_sequences_moved_inside_a_custom_loop_are_refused(tmp_path, change):
    model, cache, ids = make_model(), DynamicCache(), torch.tensor([[1, 5, 9, 13, 7], [1, 5, 8, 13, 7]])
    manager = DynamicProbeManager(make_pack(tmp_path / "pack", make_model()), keep_top_k=0)
    with manager.attach(model) as run, torch.no_grad(), run.generating(from_column=5) as loop:
        out = model(ids, past_key_values=cache)
        ids = torch.cat([ids, out.logits[:, -1:].argmax(-1)], 1)
        loop.sampled(ids)
        if change == "moved":
            cache.reorder_cache(torch.tensor([1, 0]))
        else:
            for layer in cache.layers:
                layer.keys[0] += 1
        with pytest.raises(AlignmentError, match="rows of the cache were moved or written to"):
            model(ids[:, -1:], past_key_values=cache)


@pytest.mark.filterwarnings("ignore")  # of kernels that are not installed
@pytest.mark.parametrize("kind", [MambaConfig, Mamba2Config])
@pytest.mark.parametrize("change", ["none", "moved", "exchanged"])
def test_recurrent_state_changed_inside_a_custom_loop_is_refused(tmp_path, kind, change):
    """It holds no keys and values to compare, so nobody may touch it between two forwards."""
    sizes = {} if kind is MambaConfig else {"num_heads": 4, "head_dim": 8, "n_groups": 1, "chunk_size": 4}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        kind(vocab_size=61, hidden_size=16, state_size=4, num_hidden_layers=2, expand=2, **sizes)
    ).eval()
    manager = DynamicProbeManager(make_pack(tmp_path / "pack", model), keep_top_k=0)
    prompt = torch.tensor([[1, 5, 9, 13, 7], [1, 15, 8, 33, 17]])
    with torch.no_grad():
        other = model(prompt, use_cache=True).cache_params
    with manager.attach(model) as run, torch.no_grad(), run.generating(from_column=5) as loop:
        out = model(prompt, use_cache=True)
        cache = other if change == "exchanged" else out.cache_params
        ids = torch.cat([prompt, out.logits[:, -1:].argmax(-1)], 1)
        loop.sampled(ids)
        if change == "moved":
            cache.reorder_cache(torch.tensor([1, 0]))
        if change != "none":
            with pytest.raises(AlignmentError, match="rows of the cache were moved or written to"):
                model(ids[:, -1:], cache_params=cache, use_cache=True)
            return
        out = model(ids[:, -1:], cache_params=cache, use_cache=True)
        ids = torch.cat([ids, out.logits[:, -1:].argmax(-1)], 1)
        loop.sampled(ids)
    with manager.attach(model) as again:
        generated = model.generate(prompt, max_new_tokens=2, do_sample=False, eos_token_id=None, pad_token_id=0)
    scores, expected = run.result(ids).scores, again.result(generated).scores
    assert torch.equal(ids, generated) and np.array_equal(scores.probes, expected.probes)
    assert np.allclose(scores.values, expected.values, atol=1e-5)


@pytest.mark.parametrize("same", [False, True])
def test_copy_of_one_of_two_equal_caches_is_not_matched_to_the_other(tmp_path, same):
    """A hook after the last keys and values tells two generations apart, whose caches are the same."""
    model, steered = make_model(layers=2), [0]
    manager = DynamicProbeManager(make_pack(tmp_path / "pack", model, sites=("resid_post.1",)), keep_top_k=0)
    by = torch.randn(2, 16) * 2
    model.model.layers[1].mlp.register_forward_hook(lambda module, args, out: out + by[steered[0]])
    ids, caches = torch.tensor([[1, 5, 9, 13, 7]]), (DynamicCache(), DynamicCache())
    settings = {"max_new_tokens": 1, "do_sample": False, "eos_token_id": None}
    with manager.attach(model) as run:
        for steered[0], cache in enumerate(caches):
            steered[0] *= not same
            out = model.generate(ids, past_key_values=cache, **settings)
        steered[0] = 0
        out = model.generate(torch.cat([ids, ids[:, :2]], 1), past_key_values=copy.deepcopy(caches[0]), **settings)
    unseen = run.result(out).coverage.unseen
    assert list(unseen) == ["" if same else BEFORE] * 5 + ["", "", LAST]
