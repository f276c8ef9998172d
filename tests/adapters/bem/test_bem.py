"""Attaching, merging, detaching, saving and loading a BEM adapter."""

import copy
import gc
import json
import pickle
import re
import shutil
import weakref

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import DynamicCache

from bem_oracle import SHAPES, VOCAB, dense_update, make_host, randomise
from conftest import PAD, make_model, make_pack, n_hooks
from oracle import check, states
from probemon import DynamicProbeManager
from probemon.adapters.bem import Bem, BemConfig, attach_bem
from probemon.adapters.bem.saved import SETTINGS, WEIGHTS, settings_hash
from probemon.adapters.ltm import attach_memory
from probemon.errors import BemError, BemFileError, ConfigError, KernelUnavailable, ModelMismatch, UnsupportedModel
from probemon.util.files import sha256

SMALL = {"rank": 3, "width": 6, "chunk_tokens": 4, "prefix_tokens": 8}
ALL = ("q", "k", "v", "o", "down")
GREEDY = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": PAD, "eos_token_id": None}
IDS = torch.randint(3, VOCAB, (2, 21), generator=torch.Generator().manual_seed(0))


def logits(model, ids=IDS):
    with torch.no_grad():
        return model(ids, use_cache=False).logits


def trace(model):
    """All that an adapter could leave behind on a host."""
    attributes = {(name, key) for name, module in model.named_modules() for key in vars(module)}
    parameters = {name: (id(p), p._version, p.requires_grad) for name, p in model.named_parameters()}
    return n_hooks(model), attributes, parameters, set(model.state_dict()), len(list(model.modules()))


# -- 4: unchanged, and merged ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_fresh_adapter_leaves_the_model_bit_identical(shape, dtype):
    model = make_host(shape).to(dtype)
    expected, tokens = logits(model), model.generate(IDS, **GREEDY)
    with attach_bem(model, BemConfig(sites=ALL, level="auto", **SMALL)) as bem:
        assert len(bem.sites) == 10
        assert torch.equal(logits(model), expected)
        assert torch.equal(model.generate(IDS, **GREEDY), tokens)
        with torch.no_grad():
            bem.updates["down_1"].U.add_(0.1)
        assert not torch.equal(logits(model), expected)  # so it was there


@pytest.mark.parametrize(
    "sites, dtype, tolerance", [(("o", "down"), torch.float32, 1e-5), (ALL, torch.float64, 1e-12)], ids=["fp32", "fp64"]
)
@pytest.mark.parametrize("level", ["position", "prefix", "auto"])
@pytest.mark.parametrize("shape", SHAPES)
def test_constant_code_equals_a_merged_weight(shape, level, sites, dtype, tolerance):
    """Routers of biases alone: the same code at every token, and W + s U diag(c) V^T in place of W (beside experts,
    which share no W).
    """
    model = make_host(shape).to(dtype)
    if shape == "mixtral":
        model.set_experts_implementation("eager")  # the others have no fp64
    bem = randomise(
        Bem(model, BemConfig(sites=sites, level=level, token_limit=7, spectral_cap=None, **SMALL)).to(dtype), size=0.2
    )
    code = torch.tensor([0.7, -1.1, 0.4], dtype=dtype)
    controller = bem.controller
    with torch.no_grad():
        for router in (controller.prefix, controller.chunk, controller.token):
            if router is not None:
                router[-1].weight.zero_()
                router[-1].bias.copy_(code)
        if controller.default_code is not None:
            controller.default_code.copy_(code)
        controller.confidence[-1].weight.zero_()
        controller.confidence[-1].bias.copy_(controller.default_confidence)
        sure = torch.sigmoid(controller.default_confidence / controller.log_temperature.exp())
    merged, base = copy.deepcopy(model), logits(model)
    with torch.no_grad():
        for site in bem.sites:
            # The clamp divides by |c| + 1e-8.
            added = dense_update(bem.updates[site.key], code * sure / (1 + 1e-8 / code.norm()), bem.config.scale)
            layer = merged.model.layers[site.layer]
            if site.mergeable:
                layer.get_submodule(
                    {"down": "mlp.down_proj"}.get(site.kind, f"self_attn.{site.kind}_proj")
                ).weight += added
            else:
                layer.mlp.register_forward_hook(lambda module, args, output, added=added: output + args[0] @ added.T)
    with bem:
        found, tokens = logits(model), model.generate(IDS, **GREEDY)
    assert (found - logits(merged)).abs().max() < tolerance
    assert (found - base).abs().max() > 0.1
    assert torch.equal(tokens, merged.generate(IDS, **GREEDY))


def test_only_linear_sites_can_be_merged():
    assert [(site.name, site.mergeable) for site in Bem(make_host("mixtral"), BemConfig(**SMALL)).sites] == [
        ("o.0", True),
        ("down.0", False),
        ("o.1", True),
        ("down.1", False),
    ]
    assert all(site.mergeable for site in Bem(make_host("qwen3"), BemConfig(sites=ALL, **SMALL)).sites)


# -- 6: on and off -----------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_detach_restores_the_model(shape):
    model = make_host(shape)
    before = trace(model)
    bem = randomise(attach_bem(model, BemConfig(sites=ALL, level="auto", **SMALL)))
    assert n_hooks(model) > before[0]
    assert (
        set(model.state_dict()) == before[3] and len(list(model.modules())) == before[4]
    )  # its parameters are its own
    cache = DynamicCache()
    untouched = set(vars(cache))
    model.generate(IDS, **GREEDY, past_key_values=cache)
    copied = copy.deepcopy(cache)
    assert set(vars(cache)) > untouched and bem.state(copied) is not None
    bem.detach()
    assert trace(model) == before
    assert not [
        key
        for kept in (cache, copied)
        for key in vars(kept)
        if key in ("reorder_cache", "batch_repeat_interleave", "batch_select_indices", "reset")
    ]
    bem.detach()  # twice is once
    assert trace(model) == before


@pytest.mark.parametrize("where", ["in the block", "in the host", "while generating"])
def test_error_inside_the_block_detaches_the_adapter(where):
    model = make_host()
    before, expected = trace(model), logits(model)

    def fail(*_):
        raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"), randomise(attach_bem(model, BemConfig(**SMALL))):
        if where == "in the block":
            fail()
        elif where == "in the host":
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(model.model.layers[1].mlp, "forward", fail)
                logits(model)
        else:
            model.generate(IDS, **GREEDY, logits_processor=[fail])
    assert trace(model) == before and torch.equal(logits(model), expected)


def test_invalid_site_leaves_no_hooks():
    model = make_host()
    before = trace(model)
    with pytest.raises(ConfigError, match=r"layers has 5: the model has layers 0\.\.1"):
        attach_bem(model, BemConfig(layers=(0, 5)))
    model.model.layers[1].self_attn.o_proj = torch.nn.Identity()
    with pytest.raises(UnsupportedModel, match=r"site 'o\.1': LlamaAttention has no linear layer named o_proj"):
        attach_bem(model, BemConfig())
    assert n_hooks(model) == before[0]


def test_second_adapter_needs_the_first_detached_and_reattaching_works():
    model = make_host()
    base = logits(model)
    first = randomise(attach_bem(model, BemConfig(**SMALL)), seed=1)
    with pytest.raises(BemError, match="detach it first"):
        attach_bem(model, BemConfig())
    one = logits(model)
    first.detach()
    with randomise(attach_bem(model, BemConfig(**SMALL)), seed=2):
        other = logits(model)
    with first:
        assert torch.equal(logits(model), one)
    assert not torch.equal(one, other) and torch.equal(logits(model), base)


def test_caches_and_models_are_freed_with_their_last_user():
    """A cache dies with its last user, and a host with its adapter."""
    model = make_host()
    bem = attach_bem(model, BemConfig(**SMALL))
    gc.disable()
    try:
        cache = DynamicCache()
        logits_of = model(IDS, past_key_values=cache).logits
        seen = weakref.ref(cache)
        del cache, logits_of
        assert seen() is None and len(bem._states) == 0  # without the garbage collector: keys and values are large
    finally:
        gc.enable()
    host = weakref.ref(model)
    del model, bem
    gc.collect()
    assert host() is None


def test_model_with_an_adapter_refuses_to_be_copied_or_pickled():
    model = make_host()
    with attach_bem(model, BemConfig(**SMALL)) as bem:
        for take in (copy.deepcopy, pickle.dumps):
            with pytest.raises(UnsupportedModel, match="save_pretrained"):
                take(model)
            with pytest.raises(UnsupportedModel, match="save_pretrained"):
                take(bem)
    copy.deepcopy(model)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_adapter_combines_with_peft_and_probes_see_its_output():
    from peft import LoraConfig, get_peft_model

    from probemon.host.tap import Tap

    model = make_host()
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["o_proj"], init_lora_weights=False))
    base, seen = logits(adapted), []
    with (
        randomise(attach_bem(adapted, BemConfig(**SMALL))),
        Tap(model, ["resid_post.1"], lambda site, hidden: seen.append(hidden)),
    ):
        steered = logits(adapted)
    assert (steered - base).abs().max() > 0.1 and torch.equal(logits(adapted), base)
    with torch.no_grad():
        assert torch.equal(model.lm_head(model.model.norm(seen[0])), steered)


def test_offloaded_model_is_steered_identically():
    from accelerate import cpu_offload

    model = make_host()
    with randomise(attach_bem(model, BemConfig(sites=ALL, **SMALL))):
        expected = logits(model)
    cpu_offload(model, execution_device=torch.device("cpu"))
    assert {p.device.type for p in model.parameters()} == {"meta"}
    with randomise(attach_bem(model, BemConfig(sites=ALL, **SMALL))):
        assert torch.equal(logits(model), expected)


@pytest.mark.filterwarnings("ignore:.*adapters .*bem.* are active:UserWarning")
@pytest.mark.parametrize("first_out", ["adapter", "probes"])
def test_probes_score_steered_states_in_either_detach_order(first_out, tmp_path):
    model = make_model()
    before = n_hooks(model), set(vars(model))
    manager = DynamicProbeManager(
        make_pack(tmp_path / "pack", model, sites=("resid_post.2", "resid_post.0")), keep_top_k=6
    )
    bare = manager.score_tokens(states(model, manager.pack, IDS[0].tolist()))
    bem, run = randomise(attach_bem(model, BemConfig(**SMALL))), manager.attach(model)
    with run:
        out = model.generate(IDS[:1], **GREEDY)
        result = run.result(out)
        check(manager, model, result, 0, out[0].tolist(), 0, [(21, 7)])  # against a plain forward of the steered host
        assert any(result.scores.active_scores(i).tolist() != bare.active_scores(i).tolist() for i in range(21))
        if first_out == "adapter":
            bem.detach()
    if first_out == "probes":
        assert torch.equal(model.generate(IDS[:1], **GREEDY), out)
        bem.detach()
    assert (n_hooks(model), set(vars(model))) == before


def test_controller_runs_once_a_forward_and_its_hooks_can_replace_codes():
    model = make_host()
    with randomise(attach_bem(model, BemConfig(sites=ALL, **SMALL))) as bem:
        seen, steered = [], logits(model)
        with bem.controller.register_forward_hook(lambda module, args, codes: seen.append(codes)):
            model.generate(IDS, **GREEDY)
        assert [tuple(codes.of("token").shape) for codes in seen] == [(2, 21, 3)] + [(2, 1, 3)] * 7
        assert torch.stack([codes.boundary[0, -1] for codes in seen]).tolist() == [n % 4 == 0 for n in range(20, 28)]

        def nothing(module, args, codes):
            return codes.replace(chunk=torch.zeros_like(codes.chunk), token=torch.zeros_like(codes.token))

        with bem.controller.register_forward_hook(nothing):
            silenced = logits(model)
    assert torch.equal(silenced, logits(model)) and not torch.equal(steered, silenced)


def test_unavailable_implementation_is_refused_when_requested(monkeypatch):
    model = make_host()
    for impl in ("cuda", "cpu", "numba", "Auto", ""):
        with pytest.raises(
            ConfigError, match=f"impl '{impl}': expected one of reference, triton; attach_bem takes 'auto' too"
        ):
            attach_bem(model, BemConfig(), impl=impl)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for installed in (True, False):
        if not installed:
            monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(KernelUnavailable) as refused:
            attach_bem(model, BemConfig(), impl="triton")
        assert n_hooks(model) == 0
        remedies = set(re.findall(r"impl='(\w+)'", str(refused.value))) - {"triton"}
        assert remedies == {"reference", "auto"}
    for impl in remedies:  # what the message says helps
        with attach_bem(model, BemConfig(), impl=impl) as bem:
            assert bem.impl == "reference"


@pytest.mark.parametrize("eps", [None, 0.5])
def test_the_triton_kernel_steers_as_the_reference_does(eps):
    model, given = make_host(layers=1), []
    config = BemConfig(sites=("q", "down"), sparse_eps=eps, spectral_cap=None, **SMALL)
    for impl in ("reference", "triton"):
        with randomise(attach_bem(model, config, impl=impl)):
            given.append(logits(model, IDS[:, :9]))
    assert (given[0] - given[1]).abs().max() < 1e-5 and (given[0] - logits(model, IDS[:, :9])).abs().max() > 0.1


# -- 7: kept -----------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    model = make_host()
    with randomise(attach_bem(model, BemConfig(sites=("q", "o", "down"), layers=(1,), level="auto", **SMALL))) as bem:
        expected = logits(model)
        bem.save_pretrained(tmp_path / "made" / "adapter")
    return model, tmp_path / "made" / "adapter", expected


def test_reloaded_adapter_gives_equal_logits(folder):
    model, path, expected = folder
    assert sorted(file.name for file in path.iterdir()) == [SETTINGS, WEIGHTS]
    for load in (
        lambda: attach_bem(model, path),
        lambda: attach_bem(model, str(path)),
        lambda: Bem.from_pretrained(model, path, strict=True),
    ):
        with load() as bem:
            assert torch.equal(logits(model), expected)
            assert bem.config.layers == (1,) and bem.config.level == "auto"
    with attach_bem(model, path) as bem:
        with torch.no_grad():
            bem.updates["down_1"].U.neg_()  # not doubled: under the cap that is the same adapter
        changed = logits(model)
        bem.save_pretrained(path)  # over the older one
    with attach_bem(model, path):
        assert torch.equal(logits(model), changed) and not torch.equal(changed, expected)


def damage(path, how):  # noqa: C901 (a table of damages)
    settings, weights = path / SETTINGS, path / WEIGHTS
    stated = json.loads(settings.read_text())

    def restate(**changes):
        made = {**stated, **changes}
        settings.write_text(
            json.dumps({**made, "sha256": settings_hash({key: made[key] for key in ("config", "host", "files")})})
        )

    def reweigh(tensors):
        save_file(tensors, weights)
        restate(files={WEIGHTS: {"sha256": sha256(weights), "size": weights.stat().st_size}})

    if how == "no folder":
        shutil.rmtree(path)
    elif how == "no weights":
        weights.unlink()
    elif how == "no settings":
        settings.unlink()
    elif how == "settings are no text":
        settings.write_bytes(b"\xff\xfe\x00")
    elif how == "settings are a list":
        settings.write_text("[]")
    elif how == "truncated":
        weights.write_bytes(weights.read_bytes()[:-1])
    elif how == "a bit flipped":
        weights.write_bytes(weights.read_bytes()[:-1] + bytes([weights.read_bytes()[-1] ^ 1]))
    elif how == "a pickle":
        weights.write_bytes(pickle.dumps({"a": 1}))
        restate(files={WEIGHTS: {"sha256": sha256(weights), "size": weights.stat().st_size}})
    elif how == "a probe pack":
        restate(format="probemon-pack")
    elif how == "a later version":
        restate(format_version=2)
    elif how == "an unknown setting":
        restate(config={**stated["config"], "rnk": 8})
    elif how == "another rank":
        restate(config={**stated["config"], "rank": 4})
    elif how == "no hash":
        restate(files={})
    elif how == "a tensor missing":
        reweigh({name: x for name, x in load_file(weights).items() if name != "controller.query"})
    elif how == "a tensor too many":
        reweigh({**load_file(weights), "controller.other": torch.zeros(1)})
    elif how == "not finite":
        reweigh({name: x / 0 for name, x in load_file(weights).items()})


@pytest.mark.parametrize(
    "how, message",
    [
        ("no folder", "is not a saved adapter"),
        ("no settings", "is not a saved adapter"),
        ("no weights", "is missing"),
        ("settings are no text", "cannot be read as JSON"),
        ("settings are a list", "format is 'list'"),
        ("truncated", "size or hash differs"),
        ("a bit flipped", "size or hash differs"),
        ("a pickle", "cannot be read as safetensors"),
        ("a probe pack", "format is 'probemon-pack'"),
        ("a later version", "upgrade probemon"),
        ("an unknown setting", "did you mean 'rank'"),
        ("another rank", "of another shape"),
        ("no hash", "the hash of"),
        ("a tensor missing", "'controller.query' is missing"),
        ("a tensor too many", "'controller.other'"),
        ("not finite", "is not finite"),
    ],
)
def test_a_damaged_or_foreign_folder_is_a_typed_error(folder, how, message):
    model, path, _ = folder
    damage(path, how)
    with pytest.raises(BemFileError, match=message):
        attach_bem(model, path)
    assert n_hooks(model) == 0


def test_other_architecture_is_a_mismatch_and_other_weights_warn(folder):
    _, path, _ = folder
    with pytest.raises(ModelMismatch, match="n_layers 2, this LlamaForCausalLM has 3"):
        attach_bem(make_host(layers=3), path)
    with pytest.raises(
        ModelMismatch, match=r"site down\.1 of \[24, 16\] values in and out, this MixtralForCausalLM of \[16, 16\]"
    ):
        attach_bem(make_host("mixtral"), path)
    with pytest.warns(UserWarning, match="of other weights"):
        attach_bem(make_host(seed=3), path).detach()
    with pytest.raises(ModelMismatch, match="of other weights"):
        attach_bem(make_host(seed=3), path, strict=True)
    other = make_host()
    other.config.rms_norm_eps = 0.1
    with pytest.warns(UserWarning, match=r"of other settings \(rms_norm_eps is 0\.1 and was 1e-06\)"):
        attach_bem(other, path).detach()
    with pytest.raises(ModelMismatch, match="of other settings"):
        attach_bem(other, path, strict=True)


def under_a_lora(seed=1):
    host = make_host()
    torch.manual_seed(seed)
    return get_peft_model(host, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)).eval()


def under_a_memory(seed=1):
    host = make_host()
    torch.manual_seed(seed)
    torch.nn.init.normal_(attach_memory(host, 0, slots=4, segment=4).memory.output.weight)
    return host


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT asks by an older name
@pytest.mark.parametrize("make", [under_a_lora, under_a_memory])
def test_loading_warns_if_the_models_other_adapters_differ(tmp_path, make):
    """And the other way; with the same ones it is silent."""
    config = BemConfig(rank=2, width=4)
    with attach_bem(make(), config) as bem:
        randomise(bem)
        bem.save_pretrained(tmp_path / "with")
    with attach_bem(make(), tmp_path / "with", strict=True) as again:
        again.save_pretrained(tmp_path / "again")
    for other in (make_host(), make(seed=2)):
        with pytest.warns(UserWarning, match="of other adapters"):
            attach_bem(other, tmp_path / "again").detach()
        with pytest.raises(ModelMismatch, match="of other adapters"):
            attach_bem(other, tmp_path / "with", strict=True)
    with attach_bem(make_host(), config) as bem:
        bem.save_pretrained(tmp_path / "without")
    with pytest.raises(ModelMismatch, match=r"of other adapters \(none, and here (default|memory)\)"):
        attach_bem(make(), tmp_path / "without", strict=True)


def test_a_failing_save_leaves_the_older_files(folder, monkeypatch):
    model, path, expected = folder
    with attach_bem(model, path) as bem:
        with torch.no_grad():
            bem.updates["down_1"].U.neg_()
        monkeypatch.setattr(
            "probemon.adapters.bem.saved.sha256", lambda path: (_ for _ in ()).throw(OSError("disk full"))
        )
        with pytest.raises(OSError, match="disk full"):
            bem.save_pretrained(path)
    monkeypatch.undo()
    assert sorted(file.name for file in path.iterdir()) == [SETTINGS, WEIGHTS]
    with attach_bem(model, path):
        assert torch.equal(logits(model), expected)
