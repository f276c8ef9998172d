"""Hidden states of a tiny model by one plain forward."""

import torch


def states_of(model, out):
    """Hidden states of the tapped layer at every token of an output, by one forward of the host."""
    states = []
    handle = model.model.layers[1].register_forward_hook(lambda module, args, output: states.append(output))
    with torch.no_grad():
        model(out[:, :-1])
    handle.remove()
    return states[0] if isinstance(states[0], torch.Tensor) else states[0][0]
