"""The oracle of attribution: what was streamed against one plain forward of each final sequence, alone and unpadded."""

import numpy as np
import torch

from probemon.host.model import find_layers


def states(model, pack, ids, encoder=None, forward=None):
    """Hidden states of one unpadded sequence by one plain forward, `{site: [T, D]}`; `encoder`: what an encoder-decoder
    reads; `forward`: more arguments.
    """
    _, layers = find_layers(model)
    seen, handles = {}, []
    for site in pack.sites:
        kind, at = site.split(".")
        layer = layers[int(at)]
        if kind != "resid_post":
            names = {"attn_out": ("self_attn", "attn", "attention"), "mlp_out": ("mlp",)}[kind]
            layer = next(getattr(layer, name) for name in names if hasattr(layer, name))
        handles.append(
            layer.register_forward_hook(
                lambda m, a, out, site=site: seen.update({site: out[0] if isinstance(out, tuple) else out})
            )
        )
    try:
        with torch.no_grad():
            if encoder is not None:
                model(input_ids=torch.tensor([encoder]), decoder_input_ids=torch.tensor([ids]), use_cache=False)
            else:
                model(
                    torch.tensor([ids]),
                    **({"use_cache": False} if hasattr(model, "generate") else {}),
                    **(forward or {}),
                )
    finally:
        for handle in handles:
            handle.remove()
    return {site: hidden[0] for site, hidden in seen.items()}


def expected(manager, model, ids, turns, encoder=None, forward=None):
    """Scores of one row, token by token; `turns`: [(prompt tokens, generated tokens seen), ...] one after another. What
    was generated in an earlier turn is scored as such, and is a prompt of the last.
    """
    hidden, parts, at = states(model, manager.pack, ids, encoder, forward), [], 0
    for n_prompt, n_generated in turns:
        end = at + n_prompt + n_generated
        scores = manager.score_tokens({site: h[at:end] for site, h in hidden.items()}, prompt_len=n_prompt)
        parts = [("prompt", scores, i) for _, scores, i in parts]
        parts += [("prompt" if i < n_prompt else "generated", scores, i) for i in range(end - at)]
        at = end
    return parts


def check(manager, model, result, row, out_row, first, turns, encoder=None, forward=None, *, within=1e-5):
    """Row `row` has its tokens at columns first, first + 1, ...: all of them, none else, each with the oracle's scores,
    `within` the host's own rounding.
    """
    mine = np.flatnonzero(result.row == row)
    oracle = expected(manager, model, out_row[first : first + sum(a + b for a, b in turns)], turns, encoder, forward)
    seen = [i for i in mine if not result.coverage.unseen[i]]
    assert result.position[mine].tolist() == list(range(first, first + len(mine)))
    assert result.token_id[mine].tolist() == out_row[first : first + len(mine)]
    assert len(seen) == len(oracle)
    for i, (phase, scores, t) in zip(seen, oracle, strict=True):
        assert ("prompt", "generated")[result.phase[i]] == phase
        assert result.scores.active(i).tolist() == scores.active(t).tolist()
        worst = float(np.abs(result.scores.active_scores(i) - scores.active_scores(t)).max(initial=0))
        assert worst < within, f"row {row}, position {result.position[i]}: a score is off by {worst:.2g}"
    cover = result.coverage
    total = cover.active + cover.dropped + cover.not_reached
    assert (total[cover.seen] == manager.pack.n_probes).all() and (total[~cover.seen] == 0).all()
    return mine
