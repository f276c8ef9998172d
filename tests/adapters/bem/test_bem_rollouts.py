"""Routing learns from rewards of what the host writes: decisions of rollouts have the probabilities of one forward, the
gradient is that of the expected reward, and rewards rise.
"""

import dataclasses
import math
from itertools import product

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from bem_oracle import VOCAB, make_host, randomise
from bem_rollouts import Answers
from probemon.adapters.bem import BemConfig, attach_bem
from probemon.adapters.bem.distil import distil
from probemon.adapters.bem.evaluation.held_out import measure
from probemon.adapters.bem.grpo import GroupSettings, group_advantages, group_loss, improve_by_rollouts
from probemon.adapters.bem.imitation import imitation_error
from probemon.adapters.bem.losses import adapter_losses, hooked_codes, recorded_codes
from probemon.adapters.bem.policy import Categorical, Gaussian, improve
from probemon.adapters.bem.rollouts import RolloutSettings, log_probs, roll_out, states_read
from probemon.adapters.bem.training import TrainSettings, evaluate
from probemon.errors import ConfigError, NotSupportedHost

SMALL = {"rank": 3, "width": 6, "chunk_tokens": 4, "prefix_tokens": 8}
IDS = torch.randint(3, VOCAB, (2, 6), generator=torch.Generator().manual_seed(0))
MASK = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
PROMPTS = {"input_ids": IDS, "attention_mask": MASK}
ONE_STEP = TrainSettings(n_steps=1, lr=1e-9)
GREEDY = RolloutSettings(n_rollouts=2, max_new_tokens=11, temperature=0)


def adapter(host, seed=1, **changes):
    settings = {**SMALL, "level": "token", "token_limit": 7, "auto_limits": (5, 100), "spectral_cap": None, **changes}
    return randomise(attach_bem(host, BemConfig(**settings)), seed=seed)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("level", ["position", "auto", "prefix", "chunk", "token"])
def test_a_rollout_has_the_probabilities_of_one_forward_and_each_decision_once(level):
    host, policy = make_host(), Gaussian(0.5)
    with adapter(host, level=level) as bem:
        rollout = roll_out(bem, PROMPTS, policy, GREEDY, generator())
        again = log_probs(bem, rollout, policy)
        assert (again - rollout.log_prob).detach().abs().max() < 1e-5 and again.requires_grad

        def take(codes):
            chosen = {name: rollout.actions for name in codes.by_level()}
            return codes.replace(**chosen)

        with torch.no_grad(), hooked_codes(bem, take):
            logits = host(rollout.sequences[:, :-1], attention_mask=rollout.real[:, :-1].long(), use_cache=False).logits
        said = torch.cat([rollout.sequences[:, :1], logits.argmax(dim=-1)], dim=1)
        assert torch.equal(said[rollout.written], rollout.sequences[rollout.written])
    for row in range(4):
        expected = []
        tokens = rollout.real[row].nonzero()[:, 0].tolist()
        short = level == "auto" and row < 2
        for n, column in enumerate(tokens[:-1]):
            token_coded = level == "token" or (level == "position" and n < 7)
            change = token_coded or n % 4 == 0 or (level == "position" and n == 7)
            expected += [column] if change else []
        assert rollout.decides[row].nonzero()[:, 0].tolist() == expected
        assert set(rollout.level[row, tokens[:-1]].tolist()) <= ({0} if short or level == "prefix" else {1, 2})


def other_host(kind):
    torch.manual_seed(0)
    both = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "init_std": 0.5}
    wide = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 128}
    config = {
        "biogpt": {**both, **wide, "intermediate_size": 24, "initializer_range": 0.5},
        "opt": {**both, **wide, "word_embed_proj_dim": 16, "ffn_dim": 24},
        "xglm": {**both, "d_model": 16, "ffn_dim": 24, "num_layers": 2, "attention_heads": 2},
    }[kind]
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **config)).eval().requires_grad_(False)


@pytest.mark.parametrize("kind", ["biogpt", "opt", "xglm"])
def test_padded_rows_are_at_the_positions_of_generate_on_hosts_that_count_columns(kind):
    """Of every forward that learns or measures: padded on the left as each row alone."""
    host, policy = other_host(kind), Gaussian(0.5)
    alone = [{"input_ids": IDS[:1, 2:]}, {"input_ids": IDS[1:]}]
    labels = IDS.masked_fill(MASK == 0, -100)
    with adapter(host, sites=("o",)) as bem:
        rollout = roll_out(bem, PROMPTS, policy, GREEDY, generator())
        assert (log_probs(bem, rollout, policy) - rollout.log_prob).detach().abs().max() < 1e-4
        rows = [{**row, "labels": row["input_ids"]} for row in alone]
        padded = {**PROMPTS, "labels": labels}
        assert abs(evaluate(host, [padded]) - evaluate(host, rows)) < 1e-5
        assert abs(measure(bem, [padded], [0, 1]).loss - measure(bem, rows, [0, 1]).loss) < 1e-5
        assert abs(float(adapter_losses(bem, padded).terms["lm"]) - evaluate(host, rows)) < 1e-5
        seen = [distil(bem, batches, "mean").factors for batches in ([PROMPTS], alone)]
        for name, (_, b) in seen[0].items():
            assert (b - seen[1][name][1]).abs().max() < 1e-5
        with recorded_codes(bem) as codes:
            for row in alone:
                host(**row, use_cache=False)
        experts = torch.zeros(2, 6, 3)
        experts[0, 2:], experts[1] = (code.adaptive()[0].detach() for code in codes)
        assert imitation_error(bem, [{**PROMPTS, "expert_codes": experts}]) < 1e-8
        said = []
        improve(bem, [padded], lambda batch, out: [said.append(out.logits) or 0.0] * 2, Gaussian(1e-9), ONE_STEP)
        expected = host(IDS[:1, 2:], use_cache=False).logits
        assert (said[0][:1, 2:] - expected).abs().max() < 1e-4


def test_a_decoder_that_is_told_no_positions_is_refused(monkeypatch):
    with adapter(make_host()) as bem:
        rollout = roll_out(bem, PROMPTS, Gaussian(), GREEDY, generator())
        decoder = bem.host.model
        monkeypatch.setattr(decoder, "forward", lambda input_ids, attention_mask, use_cache: None)
        with pytest.raises(NotSupportedHost, match="without padding"):
            states_read(bem, rollout)


def test_nothing_after_the_end_of_an_answer_counts():
    host = make_host()
    with adapter(host) as bem:
        whole = roll_out(bem, PROMPTS, Gaussian(0.5), GREEDY, generator())
        end = int(whole.sequences[0, 9])  # the fourth token of the first answer
        host.generation_config.eos_token_id = end
        rollout = roll_out(bem, PROMPTS, Gaussian(0.5), GREEDY, generator())
        assert (log_probs(bem, rollout, Gaussian(0.5)) - rollout.log_prob).detach().abs().max() < 1e-5
    first = (rollout.sequences[0, 6:] == end).nonzero()[0, 0] + 6
    assert rollout.written[0].nonzero()[:, 0].tolist() == list(range(6, int(first) + 1))
    assert not rollout.decides[0, first:].any() and rollout.decides[0, int(first) - 1]
    assert torch.equal(rollout.sequences[0, : first + 1], whole.sequences[0, : first + 1])


class Forced:
    """Takes given experts in turn; probabilities are those of a policy."""

    def __init__(self, policy, choices):
        self.policy, self.choices = policy, list(choices)

    def sample(self, codes, generator):
        if not len(codes):
            return codes
        return self.policy.experts[self.choices.pop(0)].to(codes).expand_as(codes)

    def log_prob(self, codes, actions):
        return self.policy.log_prob(codes, actions)


def test_the_gradient_of_answers_is_that_of_their_expected_reward():
    """Over every answer that a policy of two experts can give in three decisions, weighed by its probability: against
    finite differences of the expected reward, in fp64.
    """
    host = make_host()
    host.generation_config.eos_token_id = None
    experts = torch.tensor([[2.0, -1.0, 0.5], [-1.5, 1.0, 2.0]], dtype=torch.float64)
    policy, prompt = Categorical(experts, 1.5), {"input_ids": IDS[1:, :4]}
    settings = RolloutSettings(n_rollouts=1, max_new_tokens=7, temperature=0)
    worth = torch.randn(VOCAB, generator=generator(3), dtype=torch.float64)
    with adapter(host, level="chunk") as bem:
        bem.controller.double()

        def answers():
            return [roll_out(bem, prompt, Forced(policy, c), settings, generator()) for c in product((0, 1), repeat=3)]

        def reward(rollout):
            return worth[rollout.sequences[0, rollout.n_prompt :]].sum()

        def expected():
            return float(sum(one.log_prob.sum().exp() * reward(one) for one in answers()))

        every = answers()
        assert abs(sum(float(one.log_prob.sum().exp()) for one in every) - 1) < 1e-12
        assert len({float(reward(one)) for one in every}) > 4
        for one in every:
            loss, _ = group_loss(log_probs(bem, one, policy), one, reward(one)[None] - 0.3, GroupSettings())
            (float(one.log_prob.sum().exp()) * loss).backward()
        parameter = bem.controller.chunk[-1].bias
        for i in range(3):
            ends = []
            for step in (1e-5, -1e-5):
                with torch.no_grad():
                    parameter[i] += step
                ends.append(expected())
                with torch.no_grad():
                    parameter[i] -= step
            slope = (ends[0] - ends[1]) / 2e-5
            assert abs(slope) > 1e-3 and abs(float(parameter.grad[i]) + slope) < 1e-6 * abs(slope) + 1e-8


def test_the_clipped_loss_and_its_divergence_have_the_values_and_slopes_of_a_plain_loop():
    host, policy = make_host(), Gaussian(0.6)
    how = GroupSettings(clip=0.2, kl=0.7)
    with adapter(host) as bem:
        bem.controller.double()
        rollout = roll_out(bem, PROMPTS, policy, GREEDY, generator())
        rollout = dataclasses.replace(rollout, log_prob=log_probs(bem, rollout, policy).detach())
        start = rollout.log_prob + 0.05
        moved = [p for p in bem.controller.token.parameters()]
        with torch.no_grad():
            for parameter in moved:
                parameter += 0.05 * torch.randn(parameter.shape, generator=generator(), dtype=torch.float64)
        advantages = group_advantages(torch.tensor([1.0, 0.0, 0.2, 0.7]), GREEDY, how)

        def value():
            return group_loss(log_probs(bem, rollout, policy), rollout, advantages, how, start)

        loss, terms = value()
        plain_loss = float(loss.detach())
        now, plain, clipped = log_probs(bem, rollout, policy).detach(), 0.0, []
        for row, column in rollout.decides.nonzero().tolist():
            ratio = math.exp(now[row, column] - rollout.log_prob[row, column])
            a, q = float(advantages[row]), math.exp(start[row, column] - now[row, column])
            limited = min(max(ratio, 0.8), 1.2) * a
            clipped.append(limited < ratio * a)
            plain += (-min(ratio * a, limited) + 0.7 * (q - math.log(q) - 1)) / 4
        assert abs(plain_loss - plain) < 1e-10 * abs(plain)
        assert abs(float(terms["clipped"]) - sum(clipped) / len(clipped)) < 1e-6 and 0 < sum(clipped) < len(clipped)
        loss.backward()
        slope, direction = 0.0, []
        for parameter in moved:
            direction.append(torch.randn(parameter.shape, generator=generator(5), dtype=torch.float64))
            slope += float((parameter.grad * direction[-1]).sum())
        ends = []
        for step in (1e-6, -2e-6):
            with torch.no_grad():
                for parameter, d in zip(moved, direction, strict=True):
                    parameter += step * d
                ends.append(float(value()[0].detach()))
        assert abs((ends[0] - ends[1]) / 2e-6 - slope) < 1e-5 * abs(slope)


def test_advantages_are_within_groups():
    how = GroupSettings(scaled=False)
    rewards = torch.tensor([1.0, 3.0, 10.0, 10.0])
    assert group_advantages(rewards, GREEDY, how).tolist() == [-1.0, 1.0, 0.0, 0.0]
    scaled = group_advantages(rewards, GREEDY, GroupSettings())
    assert (scaled - torch.tensor([-1.0, 1.0, 0.0, 0.0]) / (math.sqrt(2) + 1e-4)).abs().max() < 1e-6


def test_what_is_rewarded_in_answers_is_written_more_often_to_prompts_never_seen():
    """One seed and few steps; scripts/benchmarks/bem_rollouts.py has five, and the bandit whose regret is known."""
    answers = Answers(0)
    kept = [x.clone() for x in (*answers.model.parameters(), *answers.bem.updates.parameters())]
    found = answers.writing(24, 1e-2, 6)
    assert all(map(torch.equal, kept, (*answers.model.parameters(), *answers.bem.updates.parameters())))
    assert found["after"] > found["before"] + 0.02 and found["under_the_arm"] > found["after"], found


def test_mistakes_are_told():
    host = make_host()
    with adapter(host) as bem:
        run = lambda **more: improve_by_rollouts(  # noqa: E731
            bem,
            more.pop("prompts", [PROMPTS]),
            more.pop("reward", lambda batch, rollout: [0.0] * 4),
            Gaussian(),
            TrainSettings(n_steps=1),
            more.pop("rollouts", GREEDY),
        )
        for wrong, told in (
            ({"rollouts": RolloutSettings(n_rollouts=1)}, "a group of one answer"),
            ({"reward": lambda batch, rollout: [0.0] * 3}, r"\[0.0, 0.0, 0.0\] for 4 rows"),
            ({"prompts": [{**PROMPTS, "attention_mask": MASK.flip(1)}]}, "pad prompts on the left"),
            ({"prompts": [PROMPTS, {"input_ids": IDS[:1]}]}, "1, 2 rows"),
        ):
            with pytest.raises(ConfigError, match=told):
                run(**wrong)
    for wrong in ({"baseline": "best"}, {"clip": 0}, {"kl": -1}, {"n_updates": 0}, {"scaled": 1}):
        with pytest.raises(ConfigError):
            GroupSettings(**wrong)
