"""The rule of the cascade in plain Python, by the words of the design; and its compiled descents, to compare with."""

import numpy as np


def cascade_oracle(parents, level, path, thresholds, config, always_on, retained, own, watched=None, with_groups=set):
    """(active, dropped, scores, retained, released) of one state. `watched`: all without; `with_groups(probes)`: with
    the members of their softmax groups.
    """
    n = len(parents)
    watched = set(range(n)) if watched is None else watched

    def ancestors(p):
        return set(parents[p]) | {a for q in parents[p] for a in ancestors(q)}

    def path_score(p):
        best = max((path_score(q) for q in parents[p]), default=None)
        return own[p] if best is None or not path else np.float32(own[p] * best)

    def close(probes):
        return with_groups(set(probes) | ({a for p in probes for a in ancestors(p)} if path else set()))

    exempt = with_groups({p for p in range(n) if level[p] in config.base_layers} | set(always_on))
    roots = {p for p in range(n) if not parents[p]} if path else set()
    exempt, roots = exempt & watched, roots & watched
    active = close(exempt | roots | retained)
    frontier, dropped, rounds = set(active), set(), 0
    while frontier and (config.max_rounds is None or rounds < config.max_rounds):
        opened = {p for p in frontier if path_score(p) > thresholds[p]}
        new = {
            c: max(path_score(p) for p in parents[c] if p in opened)
            for c in range(n)
            if set(parents[c]) & opened and c not in active and c in watched
        }
        if not new:
            break
        admitted = set()
        if len(active | close(new)) <= config.max_loaded_probes:
            admitted = close(new) - active
        else:
            for c in sorted(new, key=lambda c: (-new[c], c)):
                bundle = close({c}) - active - admitted
                if len(active) + len(admitted) + len(bundle) <= config.max_loaded_probes:
                    admitted |= bundle
                else:
                    dropped.add(c)
        active |= admitted
        dropped -= active
        frontier, rounds = admitted, rounds + 1
    order = sorted(active - exempt, key=lambda p: (-path_score(p), p))
    if config.aggressive_pruning:
        order = order[: config.keep_top_k]
    before = len(order)
    if dropped:
        order = [p for p in order if path_score(p) >= config.unload_threshold]
        while order and len(close(exempt | roots | set(order))) + len(dropped) > config.max_loaded_probes:
            order.pop()
    return active, dropped, {p: path_score(p) for p in active}, set(order), before - len(order)


def compiled_descents(weights, plan, states, retained, alert):
    """Yield what the compiled descent finds for states, and what the same rule over all scores does."""
    from probemon.engine.ways.compiled import CompiledNet

    tree, config, net = plan.tree, plan.config, CompiledNet(weights)
    for everything in (False, True):
        yield net.descend(
            (tree.child_ptr, tree.child_idx, tree.parent_ptr, tree.parent_idx),
            tree.groups,
            np.zeros(tree.n, np.int64),
            1,
            states,
            len(states),
            plan.start,
            retained,
            plan.expand_threshold,
            alert,
            path_rule=plan.path_rule,
            max_rounds=config.max_rounds,
            max_active=config.max_loaded_probes,
            everything=everything,
        )
