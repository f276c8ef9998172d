"""Losses, training, imitation and distillation of adapters, on toys with known answers."""

import copy
import math
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import DynamicCache

from bem_oracle import VOCAB, dense_update, make_host, randomise
from bem_toys import BEM, LM_ONLY, SAME_SITES, imitated, imitation_error, routed, static, two_domains
from bem_toys import make_host as make_toy
from probemon.adapters.bem import Bem, BemConfig, attach_bem
from probemon.adapters.bem.distil import distil, distil_trained
from probemon.adapters.bem.imitation import imitate
from probemon.adapters.bem.losses import LossWeights, adapter_losses, base_logits, recorded_codes, share_entropy
from probemon.adapters.bem.reduced_rank import Sums, best_fit
from probemon.adapters.bem.training import Objective, TrainSettings, evaluate, fit, train
from probemon.errors import BemError, BemFileError, ConfigError, ModelMismatch, UnsupportedModel

SMALL = {"rank": 3, "width": 6, "chunk_tokens": 4, "prefix_tokens": 8}
IDS = torch.randint(3, VOCAB, (3, 19), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(IDS)
MASK[0, :6] = 0
MASK[1, 15:] = 0
BATCH = {"input_ids": IDS, "attention_mask": MASK}
POSITIONS = torch.stack([torch.arange(19) for _ in IDS])  # as generate() has them
POSITIONS[0] = (POSITIONS[0] - 6).clamp(min=0)
POSITIONS[1, 15:] = 0
peft_asks_by_an_older_name = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")


def logits_of(model, ids=IDS, mask=None):
    with torch.no_grad():
        return model(ids, attention_mask=mask, use_cache=False).logits


def weights_of(module):
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def same(module, before):
    return all(torch.equal(parameter, before[name]) for name, parameter in module.named_parameters())


def log_softmax(x):
    x = x.double().numpy()
    return x - x.max(-1, keepdims=True) - np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True))


# -- losses ------------------------------------------------------------------------------------------


def test_kl_term_compares_with_the_unsteered_model():
    model, bare = make_host(), make_host()
    with attach_bem(model, BemConfig(**SMALL, sites=("q", "o", "down"))) as bem:
        assert float(adapter_losses(bem, BATCH).terms["kl"]) == 0.0  # U = 0
        randomise(bem)
        found = adapter_losses(bem, BATCH, LossWeights(lm=0, kl=1, entropy=0, update=0, decorrelation=0, flips=0))
        p, q = log_softmax(logits_of(model, mask=MASK)), log_softmax(logits_of(bare, mask=MASK))
        expected = float((np.exp(p) * (p - q)).sum(-1)[MASK.numpy() == 1].mean())
        assert expected > 0.1 and abs(float(found.total.detach()) - expected) < 1e-5 * expected
        found.total.backward()
        assert bem.updates["down_1"].U.grad.abs().max() > 1e-3
        with torch.no_grad():  # a step against the gradient goes nearer to the host
            for parameter in bem.parameters():
                parameter.sub_(1e-4 * (0 if parameter.grad is None else parameter.grad))
        assert float(adapter_losses(bem, BATCH).terms["kl"]) < expected


def test_base_logits_equal_the_unsteered_model_and_keep_a_running_generation():
    model = make_host()
    expected = logits_of(model, mask=MASK)
    with randomise(attach_bem(model, BemConfig(**SMALL))) as bem, torch.no_grad():
        cache = DynamicCache()
        model(IDS[:, :11], past_key_values=cache)
        assert torch.equal(base_logits(bem, BATCH), expected)
        rest = model(IDS[:, 11:], past_key_values=cache).logits
        assert (rest - logits_of(model)[:, 11:]).abs().max() < 1e-5
        model.train()
        model.model.layers[0].eval()
        base_logits(bem, BATCH)
        assert model.training and not model.model.layers[0].training  # each module in the mode it was in


@pytest.mark.parametrize("level", ["position", "chunk"])
def test_every_loss_term_equals_a_plain_loop(level):
    model = make_host()
    with randomise(
        attach_bem(model, BemConfig(**SMALL, level=level, sites=("q", "o", "down"), token_limit=9, spectral_cap=None))
    ) as bem:
        found = adapter_losses(bem, BATCH)
        with torch.no_grad(), recorded_codes(bem) as seen:
            out = model(**BATCH, position_ids=POSITIONS, use_cache=False).logits
    at = [(b, t) for b in range(3) for t in range(19) if MASK[b, t]]
    log_p = log_softmax(out)
    assert torch.equal(found.logits, out)
    lm = -np.mean([log_p[b, t - 1, IDS[b, t]] for b, t in at if t and MASK[b, t - 1]])
    assert abs(float(found.terms["lm"]) - lm) < 1e-5
    bem.requires_grad_(False).double()
    taken = {True: seen[0].chunk.double(), False: seen[0].adaptive().double()}
    norms = [
        math.sqrt(
            sum(
                float(dense_update(bem.updates[s.key], taken[s.chunked][b, t], bem.config.scale).square().sum())
                for s in bem.sites
            )
        )
        for b, t in at
    ]
    assert abs(float(found.terms["update"]) - np.mean(norms)) < 1e-4 * np.mean(norms)
    entropies = []
    for codes in taken.values():
        shares = np.array([(codes[b, t] ** 2 / (codes[b, t] ** 2).sum()).numpy() for b, t in at])
        entropy = lambda p: float(-(p * np.log(p)).sum()) / math.log(3)  # noqa: E731
        entropies.append(np.mean([entropy(p) for p in shares]) - entropy(shares.mean(0)))
    assert abs(float(found.terms["entropy"]) - np.mean(entropies)) < 1e-6
    stated = LossWeights()
    assert (
        abs(
            float(found.total.detach()) - sum(getattr(stated, name) * float(term) for name, term in found.terms.items())
        )
        < 1e-6
    )
    assert set(found.terms) == {"lm", "kl", "entropy", "update", "decorrelation", "flips"}


@pytest.mark.parametrize(
    "kind, expected", [("indifferent", 0.0), ("collapsed", 0.0), ("by chunk", -0.97), ("by token", -0.97)]
)
def test_entropy_term_rewards_specialised_codes(kind, expected):
    """Four streams over 8 dimensions whose mutual information is known: each decision has an entropy of .02 of log 8
    where it is sure, and 1 where it is not.
    """
    rng, n = np.random.default_rng(0), 4000
    each = np.array([1 - 7 * 0.0007, *[0.0007] * 7])
    assert abs(-(each * np.log(each)).sum() / math.log(8) - 0.02) < 0.001
    first = {
        "indifferent": np.zeros(n, int),
        "collapsed": np.full(n, 3),
        "by chunk": np.repeat(rng.integers(8, size=n // 4), 4),
        "by token": rng.integers(8, size=n),
    }[kind]
    shares = np.full((n, 8), 1 / 8 if kind == "indifferent" else 0.0007)
    if kind != "indifferent":
        shares[np.arange(n), first] = 1 - 7 * 0.0007
    sign = rng.choice([-1, 1], size=(n, 8))
    codes = torch.tensor(np.sqrt(shares) * sign * 1.7).view(4, -1, 8)
    assert abs(float(share_entropy(codes, torch.ones(codes.shape[:2], dtype=torch.bool))) - expected) < 0.02


def test_zero_weight_terms_are_skipped_and_weights_are_validated():
    model = make_host()
    with attach_bem(model, BemConfig(**SMALL)) as bem:
        assert set(adapter_losses(bem, BATCH, LM_ONLY).terms) == {"lm"}
    for wrong in (
        {"kl": -0.1},
        {"lm": math.nan},
        {"lm": 0, "kl": 0, "entropy": 0, "update": 0, "decorrelation": 0, "flips": 0},
    ):
        with pytest.raises(ConfigError):
            LossWeights(**wrong)
    with pytest.raises(BemError, match="attach it before it is trained"):
        adapter_losses(bem, BATCH)


def test_confidence_rises_if_the_update_helps_and_falls_if_it_harms():
    """What multiplies a code is confidence, not uncertainty: alone free to learn, it goes up for the adapter's own
    words and down for the host's.
    """
    for helps in (True, False):
        model = make_host()
        base = logits_of(model)
        with randomise(attach_bem(model, BemConfig(**SMALL, level="token", spectral_cap=None))) as bem:
            labels = (logits_of(model) if helps else base).argmax(dim=-1).roll(1, dims=1)
            batch = {"input_ids": IDS, "labels": labels}

            with torch.no_grad():  # half sure at first
                bem.controller.confidence[-1].bias.zero_()
                bem.controller.default_confidence.zero_()

            def sure(bem=bem, model=model):
                with torch.no_grad(), recorded_codes(bem) as seen:
                    model(IDS, use_cache=False)
                return float(seen[0].confidence.mean()), float(seen[0].token.norm(dim=-1).mean())

            before = sure()
            free = [bem.controller.default_confidence, *bem.controller.confidence.parameters()]
            fit(
                free,
                lambda batch, bem=bem: (adapter_losses(bem, batch, LM_ONLY).total, {}),
                [batch],
                TrainSettings(n_steps=15, lr=0.1),
            )
            after = sure()
        assert (after[0] > before[0] + 0.02, after[1] > 1.02 * before[1]) == (helps, helps)
        assert (after[0] < before[0] - 0.02, after[1] < 0.98 * before[1]) == (not helps, not helps)


# -- training ----------------------------------------------------------------------------------------


def test_training_is_deterministic_and_changes_only_the_adapter():
    model = make_host()
    for parameter in model.parameters():
        parameter.requires_grad_(True)  # as hosts are loaded
    before, expected, batches, made = weights_of(model), logits_of(model), two_domains(0, 1, 4, n_rows=4), []
    for seed in (0, 0, 1):
        with attach_bem(model, BemConfig(**SMALL, dropout=0.2)) as bem:
            untrained = weights_of(bem)
            history = train(bem, batches, TrainSettings(n_steps=8, seed=seed, n_warmup=3))
            made.append((weights_of(bem), history))
            full, cache = logits_of(model), DynamicCache()
            with torch.no_grad():
                parts = [model(IDS[:, a:b], past_key_values=cache).logits for a, b in ((0, 7), (7, 8), (8, 9), (9, 19))]
            assert (torch.cat(parts, dim=1) - full).abs().max() < 1e-5 and (full - expected).abs().max() > 1e-3
        assert not model.training and all(
            parameter.requires_grad and parameter.grad is None for parameter in model.parameters()
        )
        assert same(model, before) and torch.equal(logits_of(model), expected)
        assert any(not torch.equal(x, untrained[name]) for name, x in made[-1][0].items())
    assert all(torch.equal(x, made[1][0][name]) for name, x in made[0][0].items()) and made[0][1] == made[1][1]
    assert any(not torch.equal(x, made[2][0][name]) for name, x in made[0][0].items())
    assert [round(step.lr / 1e-2, 6) for step in made[0][1].steps] == [0.25, 0.5, 0.75, 1, 0.8, 0.6, 0.4, 0.2]


def test_nonfinite_loss_stops_training_before_an_update():
    model = make_host()
    with torch.no_grad():
        model.get_output_embeddings().weight[0] = math.nan
    with randomise(attach_bem(model, BemConfig(**SMALL))) as bem:
        before = weights_of(bem)
        with pytest.raises(BemError, match="step 0: the loss is nan"):
            train(bem, [{"input_ids": IDS, "labels": IDS}], TrainSettings(n_steps=2), LM_ONLY)
        assert same(bem, before)
        with pytest.raises(ConfigError, match="no batches"):
            train(bem, [], TrainSettings(n_steps=2))
    for wrong in (
        {"n_steps": 0},
        {"n_steps": 1, "lr": 0.0},
        {"n_steps": 1, "max_grad_norm": 0.0},
        {"n_steps": 1, "n_warmup": -1},
        {"n_steps": 1, "weight_decay": math.nan},
    ):
        with pytest.raises(ConfigError):
            TrainSettings(**wrong)


def test_transformers_trainer_learns_the_same(tmp_path):
    from transformers import Trainer, TrainingArguments

    rows = [
        {"input_ids": ids, "labels": labels}
        for batch in two_domains(0, 1, 1, n_rows=6)
        for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True)
    ]
    weights, made = LossWeights(), []
    for by_trainer in (True, False):
        model = make_host()
        before = weights_of(model)
        with attach_bem(model, BemConfig(**SMALL)) as bem:
            if by_trainer:
                arguments = TrainingArguments(
                    output_dir=str(tmp_path),
                    max_steps=5,
                    per_device_train_batch_size=6,
                    learning_rate=1e-2,
                    lr_scheduler_type="linear",
                    warmup_steps=0,
                    weight_decay=0.0,
                    max_grad_norm=0.5,
                    optim="adamw_torch",
                    report_to=[],
                    save_strategy="no",
                    logging_strategy="no",
                    use_cpu=True,
                    disable_tqdm=True,
                    dataloader_pin_memory=False,
                )
                trainer = Trainer(model=Objective(bem, weights), args=arguments, train_dataset=rows)
                trainer.train()
                assert {id(p) for group in trainer.optimizer.param_groups for p in group["params"]} == {
                    id(p) for p in bem.parameters()
                }
                model.eval()
            else:
                batch = {name: torch.stack([row[name] for row in rows]) for name in ("input_ids", "labels")}
                train(bem, [batch], TrainSettings(n_steps=5, lr=1e-2, n_warmup=0, max_grad_norm=0.5), weights)
            made.append(weights_of(bem))
        assert same(model, before) and all(parameter.grad is None for parameter in model.parameters())
    assert max(float((x - made[1][name]).abs().max()) for name, x in made[0].items()) < 1e-5
    assert float(made[0]["updates.down_1.U"].abs().max()) > 1e-3


def test_trainer_checkpoint_opens_as_an_adapter_and_resumes_exactly(tmp_path):
    """And the training goes on from it, as if it had never stopped."""
    from transformers import Trainer, TrainingArguments

    rows = [{"input_ids": ids, "labels": ids} for ids in two_domains(0, 1, 1, n_rows=6)[0]["input_ids"]]

    def trainer(folder, n_steps, bem, **more):
        arguments = TrainingArguments(
            output_dir=str(folder),
            max_steps=n_steps,
            per_device_train_batch_size=3,
            learning_rate=5e-2,
            lr_scheduler_type="constant",
            report_to=[],
            save_steps=2,
            logging_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
            dataloader_pin_memory=False,
            **more,
        )
        return Trainer(model=Objective(bem), args=arguments, train_dataset=rows)

    model, config = make_host(), BemConfig(**SMALL, level="prefix", sites=("v", "down"), alpha=5)
    with attach_bem(model, config) as bem:
        straight = trainer(tmp_path, 4, bem)
        straight.train()
        straight.save_model(tmp_path / "last")
        model.eval()
        expected = {"last": logits_of(model), "checkpoint-4": logits_of(model)}
    assert {name for name, _ in straight.model.named_parameters()} == {
        f"bem.{name}" for name, _ in bem.named_parameters()
    }
    bare = logits_of(model)
    with attach_bem(model, tmp_path / "checkpoint-2", strict=True) as half:
        expected["checkpoint-2"] = logits_of(model)
        assert (
            not torch.equal(expected["checkpoint-2"], expected["last"])
            and not torch.equal(expected["checkpoint-2"], bare)
            and half.config == config
        )
    for name, logits in expected.items():
        with attach_bem(model, tmp_path / name, strict=True) as opened:
            assert opened.config == config
            assert torch.equal(logits_of(model), logits)
            opened.save_pretrained(tmp_path / f"adapter-{name}")
        with attach_bem(model, tmp_path / f"adapter-{name}"):
            assert torch.equal(logits_of(model), logits)
    # A host may lie beside its adapter, and not a second adapter.
    model.save_pretrained(tmp_path / "adapter-last")
    with attach_bem(model, tmp_path / "adapter-last"):
        assert torch.equal(logits_of(model), expected["last"])
    shutil.copy(tmp_path / "checkpoint-2" / "model.safetensors", tmp_path / "adapter-last")
    with pytest.raises(BemFileError, match=r"holds two adapters.*bem\.json.*model\.safetensors"):
        attach_bem(model, tmp_path / "adapter-last")
    with attach_bem(model, config) as fresh:
        trainer(tmp_path / "again", 4, fresh).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        model.eval()
        assert torch.equal(logits_of(model), expected["last"])
    with pytest.raises(ModelMismatch, match="layers"):
        attach_bem(make_host(layers=3), tmp_path / "last")


def test_checkpoint_without_an_adapter_is_refused_with_a_remedy(tmp_path):
    model, path = make_host(), tmp_path / "model.safetensors"
    with attach_bem(model, BemConfig(**SMALL)) as bem:
        whole = {name: x.detach().clone() for name, x in Objective(bem).state_dict().items()}
    settings = bytes(whole["settings"].tolist())

    def stated(text):
        return {**whole, "settings": torch.tensor(list(text), dtype=torch.uint8)}

    for tensors, told in (
        ({name: x for name, x in whole.items() if name != "settings"}, "of an older probemon: train on from it"),
        ({"weight": torch.zeros(2)}, r"does not state the settings of an adapter: give a folder with bem.json"),
        (stated(settings[:-9]), "cannot be read as JSON"),
        (stated(b"[1]"), "format is 'list'"),
        (stated(settings.replace(b'"rank": 3', b'"rank": 4')), "of another shape"),
        (stated(settings.replace(b'"format_version": 1', b'"format_version": 2')), "upgrade probemon"),
        (stated(settings.replace(b'"ema"', b'"emu"')), "config lacks ema"),
        ({**whole, "bem.controller.query": whole["bem.controller.query"] * math.nan}, "is not finite"),
    ):
        save_file(tensors, path)
        with pytest.raises(BemFileError, match=told):
            attach_bem(model, tmp_path)
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(BemFileError, match="cannot be read as safetensors"):
        attach_bem(model, tmp_path)


@peft_asks_by_an_older_name
def test_routed_adapter_learns_two_domains_better_than_a_larger_lora():
    """One seed and few steps."""
    learning, held_out = two_domains(0, 1, 16), two_domains(0, 3, 8)
    model, bem, n_routed = routed(0, 3e-2, 60, learning)
    found = evaluate(model, held_out)
    bem.detach()
    assert evaluate(model, held_out) > 3  # all of it was the adapter's
    lora, n_lora, _ = static(0, 3e-2, 60, learning, SAME_SITES, n_routed)
    assert n_lora >= n_routed == sum(p.numel() for p in bem.parameters())
    assert found < evaluate(lora, held_out) - 0.1
    with pytest.raises(ConfigError, match="no batch has a label"):
        evaluate(model, [{**held_out[0], "labels": torch.full_like(held_out[0]["labels"], -100)}])


# -- imitation ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["prefix", "token"])
def test_imitation_generalises_to_unseen_sequences(level):
    found = imitated(0, 150, level)
    assert found["before"] > 1 and found["after"] < 0.01


def test_imitation_error_is_zero_for_the_experts_and_one_for_their_mean():
    model = make_host()
    with randomise(attach_bem(model, BemConfig(**SMALL, level="token")), seed=1) as bem:
        with torch.no_grad(), recorded_codes(bem) as seen:
            model(**BATCH, use_cache=False)
        own = {**BATCH, "expert_codes": seen[0].token}
        before, of_host = weights_of(bem.updates), weights_of(model)
        assert imitation_error(bem, [own]) == 0.0
        kept = seen[0].token[MASK == 1].double()
        moved = {**own, "expert_codes": seen[0].token + torch.tensor([0.1, 0, 0])}
        expected = 0.01 * len(kept) / float((kept - kept.mean(0)).square().sum())
        assert abs(imitation_error(bem, [moved]) - expected) < 1e-5 * expected
        imitate(bem, [moved], TrainSettings(n_steps=3))
        assert same(bem.updates, before) and same(model, of_host)
        constant(bem, kept.mean(0).float() * 1.0, sure=1.0)
        assert abs(imitation_error(bem, [own]) - 1) < 1e-4
        for wrong, message in (
            ({}, "expert_codes of a batch are a NoneType"),
            ({"expert_codes": torch.zeros(3, 4)}, r"of shape \(3, 4\)"),
            ({"expert_codes": torch.full((3, 3), 2.0)}, "scale the experts down"),
        ):
            with pytest.raises(ConfigError, match=message):
                imitate(bem, [{**BATCH, **wrong}], TrainSettings(n_steps=1))


@torch.no_grad()
def constant(bem, code, sure=None):
    """Every router gives one code, times a constant confidence; `sure`: nearly this."""
    controller = bem.controller
    for router in (controller.prefix, controller.chunk, controller.token):
        if router is not None:
            router[-1].weight.zero_()
            router[-1].bias.copy_(code)
    if controller.default_code is not None:
        controller.default_code.copy_(code)
    if sure is not None:
        controller.log_temperature.zero_()
        controller.default_confidence.fill_(20.0 if sure == 1.0 else math.log(sure / (1 - sure)))
    controller.confidence[-1].weight.zero_()
    controller.confidence[-1].bias.copy_(controller.default_confidence)
    return bem


# -- distillation ------------------------------------------------------------------------------------


@peft_asks_by_an_older_name
@pytest.mark.parametrize("cap", [None, 0.5])
def test_a_constant_code_becomes_a_lora_that_peft_loads(tmp_path, cap):
    """Also where the cap makes it another code at every site. Logits are the adapter's, and those of merged weights."""
    from peft import PeftModel

    model = make_host()
    bem = Bem(
        model,
        BemConfig(**SMALL, level="position", token_limit=9, sites=("q", "v", "o", "down"), spectral_cap=cap, alpha=7.5),
    )
    constant(randomise(bem, size=0.2), torch.tensor([0.7, -1.1, 0.4]))
    with bem:
        expected = logits_of(model, mask=MASK)
        found = distil(bem, [BATCH])
    assert found.error < 1e-12 and set(found.factors) == {
        f"model.layers.{i}.{n}"
        for i in (0, 1)
        for n in ("self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.down_proj")
    }
    found.save(tmp_path / "lora")
    found.save(tmp_path / "lora")  # over the older one
    assert sorted(path.name for path in (tmp_path / "lora").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    merged = copy.deepcopy(model)
    with torch.no_grad():
        for name in found.factors:
            merged.get_submodule(name).weight += found.dense(name)
    loaded = logits_of(PeftModel.from_pretrained(model, tmp_path / "lora"), mask=MASK)
    real = MASK == 1
    assert (loaded - logits_of(merged, mask=MASK))[real].abs().max() < 2e-5
    assert (loaded - expected)[real].abs().max() < 1e-5 and (expected - logits_of(make_host(), mask=MASK))[
        real
    ].abs().max() > 0.1


def best_lora(x, outputs, rank):
    """The LoRA of a rank that is nearest on these tokens, and what it loses: numpy's least squares over all matrices,
    cut by the singular values of what it predicts.
    """
    everything, *_ = np.linalg.lstsq(x, outputs, rcond=None)
    directions = np.linalg.svd(x @ everything)[2][:rank]
    dense = (everything @ directions.T @ directions).T
    return dense, ((outputs - x @ dense.T) ** 2).sum() / (outputs**2).sum()


def test_least_squares_distillation_is_the_best_lora_of_its_rank():
    """Against numpy, on the outputs themselves, also at a lower rank and with fewer tokens than inputs. The best one of
    the adapter's own U and V is further away.
    """
    model, ids = make_host(), torch.randint(3, VOCAB, (4, 17), generator=torch.Generator().manual_seed(1))
    batches = [BATCH, {"input_ids": ids}]
    with randomise(attach_bem(model, BemConfig(**SMALL, layers=(1,), sites=("down",), spectral_cap=None))) as bem:
        found, cut, few = (
            distil(bem, batches),
            distil(bem, batches, rank=2),
            distil(bem, [{"input_ids": ids[:1]}]),
        )
        pulled = [distil(bem, batches, ridge=ridge).error for ridge in (0.0, 0.1, 1e9)]
        with pytest.raises(ConfigError, match="no batch has a token"):
            distil(bem, [])
        with pytest.raises(ConfigError, match="ridge is -1"):
            distil(bem, [BATCH], ridge=-1)
        inputs, codes = [], []
        handle = bem.sites[0].module.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
        for batch, real in ((BATCH, MASK == 1), (batches[1], torch.ones_like(ids, dtype=torch.bool))):
            with torch.no_grad(), recorded_codes(bem) as seen:
                model(**batch, use_cache=False)
            inputs[-1] = inputs[-1][real]
            codes.append(seen[0].adaptive()[real])
        handle.remove()
    u, v = (getattr(bem.updates["down_1"], name).detach().double().numpy() for name in "UV")
    x, c = torch.cat(inputs).double().numpy(), torch.cat(codes).double().numpy()
    p = x @ v
    outputs = (p * c) @ u.T
    for lora, rank in ((found, 3), (cut, 2)):
        dense, error = best_lora(x, outputs, rank)
        by_lora = lora.dense("model.layers.1.mlp.down_proj").double().numpy() / bem.config.scale
        assert lora.rank == rank and abs(lora.error - error) < 1e-6
        assert np.abs(by_lora - dense).max() < 1e-4 * np.abs(dense).max()
        assert abs(((outputs - x @ by_lora.T) ** 2).sum() / (outputs**2).sum() - error) < 1e-6
    own, *_ = np.linalg.lstsq(p, outputs, rcond=None)
    own_error = ((outputs - p @ own) ** 2).sum() / (outputs**2).sum()
    assert found.method == "least_squares" and 0.01 < found.error < own_error - 0.01
    assert found.error == pulled[0] < pulled[1] < pulled[2] and abs(pulled[2] - own_error) < 1e-6
    first = x[-68:-51]  # 17 tokens of 24 inputs: exact
    assert few.error < 1e-9
    by_lora = few.dense("model.layers.1.mlp.down_proj").double().numpy() / bem.config.scale
    assert np.abs(first @ by_lora.T - outputs[-68:-51]).max() < 1e-4 * np.abs(outputs).max()


def test_a_chosen_ridge_is_nearer_on_tokens_that_were_not_seen():
    """A linear map and noise, fitted on fewer tokens than two an input: far beyond the exact fit, and not behind the
    adapter's own U and V.
    """
    generator = torch.Generator().manual_seed(0)
    u, v, moved = (torch.randn(size, generator=generator, dtype=torch.float64) for size in ((6, 3), (40, 3), (3, 40)))
    x = torch.randn(2060, 40, generator=generator, dtype=torch.float64)
    y = x @ v + 0.3 * x @ moved.T + 4 * torch.randn(2060, 3, generator=generator, dtype=torch.float64)
    sums, lost = Sums.of_sizes(3, 40), {}
    sums.add(y[:60], x[:60], x[:60] @ v)
    for ridge in (0.0, None, 1e9):
        a, b = best_fit(u, v.T, sums, ridge).cut(3)
        lost[ridge] = float(((y[60:] @ u.T - x[60:] @ a.T @ b.T) ** 2).sum())
    assert lost[None] < 0.6 * lost[0.0] and lost[None] < 1.05 * lost[1e9]


def test_wide_sites_are_fitted_apart_and_too_wide_ones_are_refused(monkeypatch):
    model = make_host()
    with randomise(attach_bem(model, BemConfig(**SMALL, sites=("o", "down")))) as bem:
        together = distil(bem, [BATCH])
        monkeypatch.setattr("probemon.adapters.bem.distil._MOST_BYTES", 8 * 24**2)
        apart = distil(bem, [BATCH])
        monkeypatch.setattr("probemon.adapters.bem.distil._MOST_INPUTS", 20)
        with pytest.raises(ConfigError, match=r"site down\.0 has 24 inputs, .* at most 20: leave 'down' out of sites"):
            distil(bem, [BATCH])
    assert together.error == apart.error and all(
        torch.equal(x, y)
        for name, pair in together.factors.items()
        for x, y in zip(pair, apart.factors[name], strict=True)
    )


@peft_asks_by_an_older_name
def test_trained_distillation_is_nearer_in_output_and_changes_nothing_else(tmp_path):
    from peft import PeftModel

    model = make_host()
    with randomise(attach_bem(model, BemConfig(**SMALL, level="token"))) as bem:
        before, of_host, wanted = weights_of(bem), weights_of(model), log_softmax(logits_of(model, mask=MASK))
        found, history = distil_trained(bem, [BATCH], TrainSettings(n_steps=40, lr=2e-2), start="nearest")
        near = distil(bem, [BATCH], ridge=None)
        assert (
            same(bem, before)
            and same(model, of_host)
            and np.array_equal(log_softmax(logits_of(model, mask=MASK)), wanted)
        )
    kl = {}
    for one in (near, found):
        one.save(tmp_path / one.method)
        given = log_softmax(logits_of(PeftModel.from_pretrained(make_host(), tmp_path / one.method), mask=MASK))
        kl[one.method] = float((np.exp(wanted) * (wanted - given)).sum(-1)[MASK.numpy() == 1].mean())
    assert (
        abs(history.losses[0] - kl["least_squares"]) < 1e-5
        and kl["trained"] < 0.5 * kl["least_squares"]
        and found.error is None
    )


def test_distilled_adapter_is_no_worse_than_a_freshly_trained_lora():
    """The same sites, rank, data, steps and learning rate."""
    lessons, held_out, settings = two_domains(0, 1, 24), two_domains(0, 3, 8), TrainSettings(n_steps=80, lr=3e-2)
    _, bem, _ = routed(0, 5e-2, 120, lessons)
    with bem:
        lora, _ = distil_trained(bem, lessons, settings)
    model = make_toy(0)
    for name in lora.factors:
        model.get_submodule(name).weight += lora.dense(name)
    anew, _, rank = static(
        0, 3e-2, 80, lessons, SAME_SITES, sum(a.numel() + b.numel() for a, b in lora.factors.values())
    )
    assert rank == lora.rank == 8 and evaluate(model, held_out) < evaluate(anew, held_out) < 2


def test_distillation_is_trained_at_labels_and_can_include_their_loss():
    """Of each term the first step's value, by hand; the rank and what training begins with are as they were
    asked for.
    """
    labels = IDS.masked_fill(torch.arange(19) % 3 > 0, -100)
    batch, settings, model = {**BATCH, "labels": labels}, TrainSettings(n_steps=1), make_host()
    with randomise(attach_bem(model, BemConfig(**SMALL, level="token", alpha=7.5, sites=("o", "down")))) as bem:
        wanted = log_softmax(logits_of(model, mask=MASK))
        near = {rank: distil(bem, [batch], rank=rank, ridge=None) for rank in (None, 2, 3, 5)}
        runs = {
            how: distil_trained(bem, [batch], settings, start=how[0], rank=how[1], labels=how[2])
            for how in (
                ("fresh", 2, 0.25),
                ("nearest", 3, 0),
                ("nearest", 2, 1.0),
                ("nearest", 5, 0.5),
                (None, None, 0),
            )
        }
        with pytest.raises(ConfigError, match="no token that counts"):
            distil_trained(bem, [{**batch, "labels": torch.full_like(IDS, -100)}], settings)
        with pytest.raises(
            ConfigError, match=r"labels is 0\.5, and a batch has input_ids, attention_mask: give it labels"
        ):
            distil_trained(bem, [BATCH], settings, labels=0.5)
        for wrong, told in (
            ({"rank": 0}, "rank is 0"),
            ({"rank": True}, "rank is True"),
            ({"labels": 1.5}, "labels is 1.5"),
            ({"labels": math.nan}, "labels is nan"),
            ({"start": "mean"}, "start is 'mean'"),
        ):
            with pytest.raises(ConfigError, match=told):
                distil_trained(bem, [batch], settings, **wrong)
    asked = (MASK[:, :-1] * MASK[:, 1:] == 1).numpy() & (labels[:, 1:] != -100).numpy()
    for (start, rank, share), (found, history) in runs.items():
        begin = copy.deepcopy(make_host())
        for name in near[rank].factors:
            if start != "fresh":
                with torch.no_grad():
                    begin.get_submodule(name).weight += near[rank].dense(name)
        given = log_softmax(logits_of(begin, mask=MASK))
        kl = (np.exp(wanted) * (wanted - given)).sum(-1)[:, :-1][asked].mean()
        lm = -np.take_along_axis(given[:, :-1], labels[:, 1:, None].clamp(min=0).numpy(), axis=-1)[..., 0][asked].mean()
        assert found.start == start or (start is None and found.start in ("nearest", "fresh"))
        assert (
            found.rank == (rank or 3)
            and found.alpha == 2.5 * found.rank
            and {a.shape[0] for a, _ in found.factors.values()} == {found.rank}
        )
        if start is not None:
            assert history.losses[0] == pytest.approx((1 - share) * kl + share * lm, abs=1e-4), (start, rank, share)
            assert history.steps[0].terms["kl"] == pytest.approx(kl, abs=1e-4) and history.steps[0].terms.get(
                "lm", lm
            ) == pytest.approx(lm, abs=1e-4)


def test_a_block_without_a_weight_cannot_become_a_lora():
    with (
        attach_bem(make_host("mixtral"), BemConfig(**SMALL)) as bem,
        pytest.raises(UnsupportedModel, match=r"site down\.0 is not a plain linear layer"),
    ):
        distil(bem, [{"input_ids": IDS}])


def test_toy_model_and_data_have_their_stated_statistics():
    """Half the rows of each domain; nine steps in ten, and chance's share of the tenth, are by the domain's own
    permutation.
    """
    batches = two_domains(0, 1, 40)
    ids = torch.cat([batch["input_ids"] for batch in batches])
    domain = torch.arange(len(ids)) % 2
    assert ((ids[:, :8] >= 11).all(dim=1) == (domain == 1)).all() and (
        (ids[:, :8] >= 11).any(dim=1) == (domain == 1)
    ).all()
    follow = [
        torch.stack(
            [
                torch.bincount(ids[domain == d, 9:][ids[domain == d, 8:-1] == token] - 20, minlength=16)
                for token in range(20, 36)
            ]
        )
        for d in (0, 1)
    ]
    for counts in follow:
        assert sorted(counts.argmax(dim=1).tolist()) == list(range(16))
        assert abs(float(counts.max(dim=1).values.sum() / counts.sum()) - (0.9 + 0.1 / 16)) < 0.01
    assert (follow[0].argmax(dim=1) != follow[1].argmax(dim=1)).sum() > 8
    assert all(
        (batch["labels"][:, :9] == -100).all() and torch.equal(batch["labels"][:, 9:], batch["input_ids"][:, 9:])
        for batch in batches
    )
    assert not any(parameter.requires_grad for parameter in make_toy(0).parameters()) and BEM["prefix_tokens"] == 8
