"""Every update form on an attached model, compared with dense matrices in fp64."""

import copy
import math
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from bem_oracle import FORMS, VOCAB, make_host, matrix_of, randomise
from conftest import PAD
from probemon.adapters.bem import BemConfig, attach_bem
from probemon.adapters.bem.distil import distil
from probemon.adapters.bem.int8 import quantize
from probemon.adapters.bem.losses import (
    LossWeights,
    adapter_losses,
    base_logits,
    codes_taken,
    recorded_codes,
    update_norm,
)
from probemon.adapters.bem.training import TrainSettings, train
from probemon.adapters.routing import RoutingMonitor
from probemon.errors import BemError, ConfigError

LENGTH = 16
GREEDY = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": PAD, "eos_token_id": None}


def some_ids(rows=1, length=LENGTH, seed=0):
    return torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def host():
    return make_host()


@pytest.fixture(params=FORMS)
def config(request):
    return FORMS[request.param]


def logits(model, ids, **more):
    with torch.no_grad():
        return model(ids, use_cache=False, **more).logits


def watched_sites(bem):
    """Inputs and outputs of each site by key, without the adapter and with it, of forwards that follow."""
    seen = {}

    def before(site):  # the adapter's hook comes after this one, and sees the same output
        def hook(module, args, output):
            seen[site.key] = [args[0].detach().clone(), output.detach().clone()]

        return hook

    def after(site):
        return lambda module, args, output: seen[site.key].append(output.detach().clone())

    firsts = [site.module.register_forward_hook(before(site), prepend=True) for site in bem.sites]
    lasts = [site.module.register_forward_hook(after(site)) for site in bem.sites]
    return seen, [*firsts, *lasts]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fresh_form_leaves_the_model_bit_identical_and_learns(config, dtype):
    model = make_host().to(dtype)
    ids = some_ids(2)
    bare = logits(model, ids)
    with attach_bem(model, config) as bem:
        assert torch.equal(logits(model, ids), bare)
        model(ids, labels=ids).loss.backward()
        last = {"head_groups": "U", "rank_mask": "U", "kronecker": "A", "film": "W"}[config.form]
        assert all(float(getattr(update, last).grad.abs().sum()) > 0 for update in bem.updates.values())
        randomise(bem)
        assert not torch.equal(logits(model, ids), bare)
    assert torch.equal(logits(model, ids), bare)


def test_zero_codes_leave_the_model_bit_identical(host, config):
    ids = some_ids(2)
    bare = logits(host, ids)
    with randomise(attach_bem(host, config)) as bem:
        assert torch.equal(base_logits(bem, {"input_ids": ids}), bare)
        assert not torch.equal(logits(host, ids), bare)


@pytest.mark.parametrize("limits", [(None, None), (0.4, None), (None, 0.9), (0.4, 0.9)], ids=str)
def test_each_site_adds_its_dense_update_within_the_limits(host, config, limits):
    cap, trust = limits
    config = replace(config, spectral_cap=cap, trust_region=trust)
    with randomise(attach_bem(host, config), size=0.8) as bem:
        codes = []
        handle = bem.controller.register_forward_hook(lambda *given: codes.append(given[2]))
        seen, handles = watched_sites(bem)
        logits(host, some_ids())
        for one in (handle, *handles):
            one.remove()
    taken = codes_taken(bem, codes[-1])
    by_site = {site: copy.deepcopy(bem.updates[site.key]).double() for site in bem.sites}
    for t in range(LENGTH):
        updates = {}
        for site, form in by_site.items():
            code = taken[site.chunked][0, t].detach().double()
            if config.form == "film":
                gamma, beta = (half[0].detach() for half in form.gamma_beta(code[None]))
                updates[site] = torch.diag(gamma), beta
            else:
                updates[site] = matrix_of(form, code).detach(), torch.zeros(site.n_out, dtype=torch.float64)
        total = sum(float(matrix.norm()) ** 2 + float(beta.norm()) ** 2 for matrix, beta in updates.values()) ** 0.5
        shrink = 1.0 if trust is None else min(1.0, trust / total)
        for site, (matrix, beta) in updates.items():
            largest = float(torch.linalg.matrix_norm(matrix, 2)) * shrink
            x, base, found = (part[0, t].double() for part in seen[site.key])
            added = matrix @ (base if config.form == "film" else x) + beta
            if config.form == "kronecker" and cap is not None:  # the cap goes by a bound of the largest singular value
                bound = float(form_bound(by_site[site], taken[site.chunked][0, t])) * shrink
                assert bound >= largest - 1e-9
                largest = bound
            share = shrink * (1.0 if cap is None else min(1.0, cap / largest))
            torch.testing.assert_close(found, base + share * added, rtol=0, atol=1e-5 * float(found.abs().max()))
            assert cap is None or share * float(torch.linalg.matrix_norm(matrix, 2)) <= cap + 1e-9


def form_bound(form, code):
    return form.sizes(code.detach().double()[None])[0].detach()


@pytest.mark.parametrize("sizes", [[1] * LENGTH, [7, 1, 5, 3], [LENGTH - 1, 1]], ids=str)
def test_cached_forward_equals_a_full_one_and_is_causal(host, config, sizes):
    ids = some_ids(2)
    with randomise(attach_bem(host, replace(config, trust_region=2.0))):
        full, cache, parts = logits(host, ids), DynamicCache(), []
        for part in ids.split(sizes, dim=1):
            with torch.no_grad():
                parts.append(host(part, past_key_values=cache).logits)
        torch.testing.assert_close(torch.cat(parts, dim=1), full, rtol=0, atol=1e-5)
        other = torch.cat([ids[:, :9], some_ids(2, LENGTH - 9, seed=1)], dim=1)
        assert torch.equal(logits(host, other)[:, :9], full[:, :9])


def test_sequences_do_not_depend_on_each_other_or_on_padding(host, config):
    ids = some_ids(3)
    with randomise(attach_bem(host, config)):
        mask = torch.ones_like(ids)
        mask[1, :5] = 0
        padded = logits(host, ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0))
        torch.testing.assert_close(padded[1, 5:], logits(host, ids[1:2, 5:])[0], rtol=0, atol=1e-5)
        torch.testing.assert_close(padded[2], logits(host, ids[2:])[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "mode",
    [{}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 3}, {"cache_implementation": "static"}],
    ids=["greedy", "beams", "drafts", "static cache"],
)
def test_cached_generation_equals_uncached(host, config, mode):
    ids = some_ids(1, 9)
    with randomise(attach_bem(host, config)):
        found = host.generate(ids, **GREEDY, **mode)
        plain = {key: value for key, value in mode.items() if key == "num_beams"}
        assert found.tolist() == host.generate(ids, **GREEDY, **plain, use_cache=False).tolist()


def test_reloaded_adapter_gives_equal_logits(host, config, tmp_path):
    ids = some_ids()
    with randomise(attach_bem(host, config)) as bem:
        before = logits(host, ids)
        bem.save_pretrained(tmp_path / "adapter")
    with attach_bem(host, tmp_path / "adapter") as bem:
        assert bem.config == config and torch.equal(logits(host, ids), before)


def test_updates_of_at_most_eps_are_left_out(host, config):
    ids = some_ids()
    with randomise(attach_bem(host, replace(config, sparse_eps=1e4))) as bem:
        bare = logits(host, ids)
        sizes = []
        handle = bem.steered.register_forward_hook(lambda *given: sizes.append(given[2].delta_rel_norm))
        logits(host, ids)
        handle.remove()
        assert float(sizes[0].max()) == 0
    assert torch.equal(logits(host, ids), bare)


def test_reported_sizes_are_those_of_the_applied_update(host, config):
    with randomise(attach_bem(host, replace(config, spectral_cap=0.4)), size=0.8) as bem:
        told = []
        bem.steered.register_forward_hook(lambda *given: told.append(given[2]))
        logits(host, some_ids())
    assert told[0].sigma1.shape == told[0].delta_rel_norm.shape == (1, LENGTH)
    assert float(told[0].sigma1.max()) <= 0.4 + 1e-6 and bool((told[0].delta_rel_norm > 0).all())


def test_penalty_on_update_sizes_has_gradients(host, config):
    with randomise(attach_bem(host, config)) as bem:
        codes = []
        bem.controller.register_forward_hook(lambda *given: codes.append(given[2]))
        host(some_ids())
        update_norm(bem, codes_taken(bem, codes[0]), torch.ones(1, LENGTH, dtype=torch.bool)).backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in bem.updates.parameters() if p.ndim > 1)
    assert float(bem.controller.project.weight.grad.abs().sum()) > 0


def test_forms_without_a_kernel_run_in_torch_and_say_so(host, config):
    with attach_bem(host, config, impl="auto") as bem:
        assert bem.impl == "reference" and f"form {config.form!r} have no kernel" in bem.impl_why
    with pytest.raises(ConfigError, match="have no kernel"):
        attach_bem(host, config, impl="triton")
    with attach_bem(host, config) as bem, pytest.raises(BemError, match="only low_rank"):
        quantize(bem)


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"form": "lora"}, "form is 'lora': give one of low_rank, head_groups"),
        ({"groups": 2}, "groups is 2: it is a setting of form='head_groups'"),
        ({"active": 2}, "form='rank_mask', and this is 'low_rank'"),
        ({"form": "head_groups", "sites": ("o",)}, "groups is None: give 1 to"),
        ({"form": "head_groups", "groups": 2}, r"give \('o',\)"),
        ({"form": "rank_mask", "rank": 4, "active": 5}, "active is 5: give 1 to 4"),
        ({"form": "rank_mask", "rank": 6, "active": 2, "hadamard": True}, "rank is 6: hadamard needs a power of two"),
        ({"form": "kronecker", "terms": 0}, "terms is 0"),
        ({"form": "film", "bound": 0}, "bound is 0"),
        ({"form": "film", "bound": float("nan")}, "bound is nan"),
    ],
)
def test_invalid_form_settings_are_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        BemConfig(**settings)


def test_groups_that_do_not_divide_the_heads_are_refused(host):
    config = BemConfig(form="head_groups", sites=("o",), groups=4, rank=2)
    with pytest.raises(ConfigError, match="groups is 4, and the model has 2 heads"):
        attach_bem(host, config)


def test_constant_codes_distil_exactly_and_a_film_is_refused(host, config):
    batch = {"input_ids": torch.cat([some_ids(1), some_ids(2)])}
    with randomise(attach_bem(host, replace(config, trust_region=0.7))) as bem:
        if config.form == "film":
            with pytest.raises(ConfigError, match=r"form is 'film'.*has no LoRA"):
                distil(bem, [batch])
            return
        code = torch.tensor([0.9, -0.4, 0.6, 0.3])[: config.code_size]

        def constant(controller, args, codes):
            return codes.replace(**{name: code.expand(*x.shape[:2], -1) for name, x in codes.by_level().items()})

        bem.controller.register_forward_hook(constant)
        said, lora = logits(host, batch["input_ids"]), distil(bem, [batch])
        applied = bem.governor.apply({True: code[None], False: code[None]})
        site = bem.sites[0]
        share = applied[site.key][0, -1]
        assert share < 1
        dense = share * matrix_of(bem.updates[site.key], code)
    name = next(name for name, module in host.named_modules() if module is site.module)
    assert lora.error < 1e-12
    assert float((lora.dense(name) - dense).detach().abs().max()) < 1e-6 * float(dense.detach().abs().max())
    assert lora.rank == max(int(torch.linalg.matrix_rank(lora.dense(n), rtol=1e-6)) for n in lora.factors)
    merged = copy.deepcopy(host)
    with torch.no_grad():
        for each in lora.factors:
            merged.get_submodule(each).weight += lora.dense(each)
    assert float((logits(merged, batch["input_ids"]) - said).abs().max()) < 1e-4


def test_distillation_loss_of_each_form_equals_a_plain_loop(host, config):
    if config.form == "film":
        pytest.skip("refused")
    ids, seen, inputs = some_ids(1, 70), [], {}  # more tokens than a site has inputs
    with ExitStack() as stack, randomise(attach_bem(host, config)) as bem:
        lora = distil(bem, [{"input_ids": ids}])
        bem.controller.register_forward_hook(lambda *given: seen.append(given[2]))
        for site in bem.sites:
            hook = lambda module, args, key=site.key: inputs.__setitem__(key, args[0][0])  # noqa: E731
            stack.callback(site.module.register_forward_pre_hook(hook).remove)
        logits(host, ids)
        applied = bem.governor.apply(codes_taken(bem, seen[-1]))
        lost = total = 0.0
        for site in bem.sites:
            name = next(name for name, module in host.named_modules() if module is site.module)
            for x, code in zip(inputs[site.key], applied[site.key][0].detach(), strict=True):
                routed = code[-1] * matrix_of(bem.updates[site.key], code[:-1]) @ x
                lost += float((routed - lora.dense(name) @ x).detach().square().sum())
                total += float(routed.detach().square().sum())
    assert lost / total > 1e-4 and abs(lora.error - lost / total) < 1e-4 * lost / total


def test_loss_of_gates_is_their_squared_correlation_and_training_lowers_it():
    """By plain Python over the real tokens of two rows, one of them padded."""
    config = replace(FORMS["head_groups"], level="token")
    mask = torch.ones(2, LENGTH, dtype=torch.int64)
    mask[0, :5] = 0
    batch = {"input_ids": some_ids(2), "attention_mask": mask}
    weights = LossWeights(lm=0, kl=0, entropy=0, update=0, decorrelation=0, flips=0, gates=1.0)
    model = make_host()
    with randomise(attach_bem(model, config)) as bem:
        with recorded_codes(bem) as seen:
            losses = adapter_losses(bem, batch, weights)
        rows = [
            [2 / (1 + math.exp(-code)) for code in seen[0].adaptive()[row, t].tolist()]
            for row in range(2)
            for t in range(LENGTH)
            if mask[row, t]
        ]
        n = len(rows)
        means = [sum(gate) / n for gate in zip(*rows, strict=True)]
        first, second = ([row[g] - means[g] for row in rows] for g in range(2))
        product, squares = (
            sum(a * b for a, b in zip(first, second, strict=True)),
            [sum(a * a for a in one) for one in (first, second)],
        )
        expected = product**2 / (squares[0] * squares[1])
        assert n == 27 and 0.01 < expected < 1
        assert float(losses.terms["gates"]) == pytest.approx(expected, rel=1e-4)
        assert float(losses.total.detach()) == pytest.approx(expected, rel=1e-4)
        after = train(bem, [batch], TrainSettings(n_steps=30, lr=1e-2), weights).losses[-1]
    assert after < 0.2 * expected
    with attach_bem(model, FORMS["rank_mask"]) as bem, pytest.raises(ConfigError, match=r"'rank_mask', .* no gates"):
        adapter_losses(bem, batch, weights)


def test_film_that_only_shifts_is_not_a_small_update(host):
    film = BemConfig(form="film", rank=3, width=6, chunk_tokens=3, prefix_tokens=6, sparse_eps=1e-3)
    ids, bare = some_ids(2), logits(host, some_ids(2))
    with attach_bem(host, film) as bem, torch.no_grad():
        for update in bem.updates.values():
            update.bias[update.n_out :] = 0.3  # beta alone
        moved = logits(host, ids)
        sizes = []
        handle = bem.steered.register_forward_hook(lambda *given: sizes.append(given[2].delta_rel_norm))
        with RoutingMonitor(host, bem=bem):
            logits(host, ids)
        handle.remove()
    with attach_bem(host, replace(film, sparse_eps=None)) as bem, torch.no_grad():
        for update in bem.updates.values():
            update.bias[update.n_out :] = 0.3
        assert torch.equal(logits(host, ids), moved) and not torch.allclose(moved, bare, atol=0.01)
    beta = 0.1 * math.tanh(0.3)  # of every output: beside them it is as large
    np.testing.assert_allclose(sizes[0], beta, rtol=1e-4)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # torch's compiler says so of itself
def test_compiled_updates_equal_eager_ones_with_and_without_a_cache():
    """A film, whose operations element by element are what a compiler fuses, in place of a kernel of our own."""
    from torch._inductor.compile_fx import compile_fx  # here: it warns

    host, ids, graphs = make_host(), some_ids(2), []
    bare = logits(host, ids)
    with randomise(attach_bem(host, FORMS["film"])) as bem:
        eager, said = logits(host, ids), host.generate(ids[:, :7], **GREEDY)
        assert (eager - bare).abs().max() > 0.1
        torch._dynamo.reset()
        for form in bem.updates.values():
            form.compile(backend=lambda graph, inputs: graphs.append(graph) or compile_fx(graph, inputs))
        assert (logits(host, ids) - eager).abs().max() < 1e-5 and graphs
        assert host.generate(ids[:, :7], **GREEDY).tolist() == said.tolist()
    torch._dynamo.reset()
