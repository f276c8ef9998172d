"""Routed adapters in plain fp64, one row and one token at a time, written from the mathematics alone; and tiny hosts to
try them on.

A row here is the list of its real tokens: no padding, no cache, no chunks of columns.
"""

import math

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from conftest import EOS, PAD
from probemon.adapters.bem import BemConfig
from probemon.adapters.bem.forms.head_groups import HeadGroups
from probemon.adapters.bem.forms.kronecker import Kronecker
from probemon.adapters.bem.forms.rank_mask import RankMask, top_mask

VOCAB = 61
SHAPES = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}

# An adapter of every form but the low-rank one.
_COMMON = {"width": 6, "chunk_tokens": 3, "prefix_tokens": 6, "token_limit": 8, "ema": 0.7}
FORMS = {
    "head_groups": BemConfig(form="head_groups", sites=("o",), groups=2, rank=3, **_COMMON),
    "rank_mask": BemConfig(form="rank_mask", rank=4, active=2, **_COMMON),
    "rank_mask rotated": BemConfig(form="rank_mask", rank=4, active=2, hadamard=True, sites=("v", "o"), **_COMMON),
    "kronecker": BemConfig(form="kronecker", terms=2, sites=("v", "o", "down"), **_COMMON),
    "film": BemConfig(form="film", rank=3, **_COMMON),
}


def matrix_of(form, code):
    """The update of a code `[n]` as a matrix `[out, in]`; None for a film, which is not one."""
    if isinstance(form, HeadGroups):
        blocks = 2 * torch.sigmoid(code)[:, None, None] * (form.U @ form.V.mT)  # [G, out, in / G]
        return form.scale * blocks.transpose(0, 1).flatten(1)
    if isinstance(form, Kronecker):
        terms = [c * torch.kron(a, b) for c, a, b in zip(code, form.A, form.B, strict=True)]
        return form.scale * torch.stack(terms).sum(dim=0)
    if isinstance(form, RankMask):
        return form.scale * form.U @ form.rotated(form.V * top_mask(code[None], form.active)).T
    return None


def make_host(shape="llama", seed=0, layers=2, noise=0.0, key_value_heads=1):
    """A tiny random host; `noise` moves every weight a little (a draft model that is often right)."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        shape,
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=key_value_heads,
        max_position_embeddings=256,
        bos_token_id=1,
        eos_token_id=EOS,
        pad_token_id=PAD,
        initializer_range=0.3,
        **SHAPES[shape],
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * noise)
    return model.requires_grad_(False)


@torch.no_grad()
def randomise(bem, seed=0, size=0.3):
    """Weights of an adapter that routes and steers: random data."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in bem.named_parameters():
        scale = size if name.startswith("updates") else 0.5
        parameter.add_(scale * torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter))
    return bem


def _linear(weights, name, x):
    return np.array([float(np.dot(row, x)) for row in weights[f"{name}.weight"]]) + weights[f"{name}.bias"]


def _norm(weights, name, x):
    centred = x - x.mean()
    return centred / math.sqrt(float((centred**2).mean()) + 1e-5) * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def _router(weights, name, x):
    middle = _linear(weights, f"{name}.1", _norm(weights, f"{name}.0", x))
    return _linear(weights, f"{name}.3", middle / (1 + np.exp(-middle)))


def _sigmoid(x):
    return 1 / (1 + math.exp(-x))


def codes_of_row(bem, hidden, auto_length=None):
    """Codes of one row of real tokens: hidden [T, D] -> a dict a token. `auto_length`: of the prompt, under
    level="auto".
    """
    config = bem.config
    weights = {name: x.detach().double().numpy() for name, x in bem.controller.state_dict().items()}
    size, temperature = config.chunk_tokens, math.exp(weights["log_temperature"].item())

    def clamp(code):
        norm = math.sqrt(float((code**2).sum()))
        return code * min(norm, config.max_norm) / (norm + 1e-8)

    z = [_linear(weights, "project", _norm(weights, "norm", np.asarray(h, dtype=np.float64))) for h in hidden]
    confidence = _sigmoid(weights["default_confidence"].item() / temperature)
    summary, chunk = weights["default_summary"], None
    if "default_code" in weights:  # only with chunk codes
        chunk = clamp(weights["default_code"]) * confidence
    found = []
    for n in range(len(z)):
        if n and n % size == 0:
            first = z[: min(config.prefix_tokens, n)]
            scores = [float(np.dot(weights["query"], x)) / math.sqrt(config.width) for x in first]
            shares = [math.exp(score - max(scores)) for score in scores]
            summary = sum(share * x for share, x in zip(shares, first, strict=True)) / sum(shares)
            seen = np.concatenate([sum(z[n - size : n]) / size, summary])
            confidence = _sigmoid(
                float(_linear(weights, "confidence.1", _norm(weights, "confidence.0", seen))[0]) / temperature
            )
            if "chunk.0.weight" in weights:
                chunk = config.ema * chunk + (1 - config.ema) * clamp(_router(weights, "chunk", seen)) * confidence
        token = {"chunk": chunk, "confidence": confidence, "chunk_index": n // size, "boundary": n % size == 0}
        if "prefix.0.weight" in weights:
            token["prefix"] = clamp(_router(weights, "prefix", summary)) * confidence
        if "token.0.weight" in weights:
            token["token"] = clamp(_router(weights, "token", np.concatenate([z[n], summary]))) * confidence
        if config.level == "position":
            token["level"] = "token" if n < config.token_limit else "chunk"
        elif config.level == "auto":
            length = len(z) if auto_length is None else auto_length
            token["level"] = (
                "prefix" if length < config.auto_limits[0] else "chunk" if length < config.auto_limits[1] else "token"
            )
        else:
            token["level"] = config.level
        found.append(token)
    return found


def dense_update(update, code, scale):
    """`s U diag(c) V^T [out, in]` of one code `[r]`: what a constant code adds to a weight."""
    return scale * (update.U * code) @ update.V.T


def governed(bem, codes):
    """The codes of one token at every site, by site name, after the limits; full matrices and their singular values."""
    config, scale = bem.config, bem.config.alpha / bem.config.rank
    matrices, applied = {}, {}
    for site in bem.sites:
        update = bem.updates[site.key]
        matrices[site.name] = (update.U.detach().double().numpy(), update.V.detach().double().numpy())
        applied[site.name] = codes["chunk"] if site.kind in "qkv" else codes[codes["level"]]

    def weight(name):
        u, v = matrices[name]
        return scale * u @ np.diag(applied[name]) @ v.T

    if config.trust_region is not None:
        total = math.sqrt(sum(float((weight(name) ** 2).sum()) for name in applied))
        if total > config.trust_region:
            applied = {name: code * config.trust_region / total for name, code in applied.items()}
    if config.spectral_cap is not None:
        for name in applied:
            largest = float(np.linalg.svd(weight(name), compute_uv=False)[0])
            if largest > config.spectral_cap:
                applied[name] = applied[name] * config.spectral_cap / largest
    return applied, {name: weight(name) for name in applied}


def steered_logits(model, bem, ids, auto_length=None):
    """Logits [T, V] fp64 of one unpadded row: the host alone, with each token's update added from its full matrix.
    `bem` is not attached.
    """
    model = model.double()
    bem.double()
    if bem.sites[-1].kind == "down" and not bem.sites[-1].mergeable:
        model.set_experts_implementation("eager")  # the other one has no fp64
    layers, handles, updates = model.get_decoder().layers, [], []

    def read(layer, args, kwargs):
        hidden = args[0] if args else kwargs["hidden_states"]
        updates[:] = [governed(bem, codes)[1] for codes in codes_of_row(bem, hidden[0].detach().numpy(), auto_length)]

    def steer(site):
        def hook(module, args, output):
            parts = [
                torch.from_numpy(update[site.name]) @ x
                for update, x in zip(updates, args[0].reshape(-1, site.n_in), strict=True)
            ]
            return output + torch.stack(parts).view_as(output)

        return hook

    try:
        handles.append(layers[bem.config.read_layer].register_forward_pre_hook(read, with_kwargs=True))
        handles += [site.module.register_forward_hook(steer(site)) for site in bem.sites]
        with torch.no_grad():
            return model(torch.tensor([ids]), use_cache=False).logits[0]
    finally:
        for handle in handles:
            handle.remove()
        model.float()
        bem.float()
