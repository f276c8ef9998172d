"""Imports a hallucination head (obalcells' hallucination_probes) as a pack of one probe.

    pack = import_head("llama3_1_8b_linear/", "my-pack", normalize="none", model="meta-llama/Llama-3.1-8B-Instruct")

With adapter_config.json, the head reads a model with that LoRA, loaded by PEFT as "default".
"""

from __future__ import annotations

from pathlib import Path
from typing import Unpack

from probemon.errors import ImportRefused
from probemon.lab.importers.flat import ImportOptions, check_options, linear, write_flat
from probemon.lab.importers.foreign_files import as_path, field, only_tensors, tensor_of
from probemon.lab.importers.kinds import instead
from probemon.lab.importers.weights import Folder, load_state_dict
from probemon.packs.pack import ProbePack
from probemon.util.files import sha256

CONFIG, HEADS, ADAPTER = "probe_config.json", ("probe_head.bin", "probe_head.safetensors"), "adapter_config.json"


def import_head(
    folder: str | Path,
    target: str | Path,
    *,
    concept: str = "hallucination",
    normalize: str | None = None,
    **about: Unpack[ImportOptions],
) -> ProbePack:
    """Write the head in a folder as a pack, read at the layer that the folder states.

    - `normalize`: of states before the head (`none`, `layernorm`, `rmsnorm`); required
    - `about`: `ImportOptions` of `probemon.lab.importers.flat`

    Raises `ImportRefused`, `UnknownSetting`.
    """
    check_options(import_head, about, normalize=normalize, without=("adapters", "notes"))
    source = Folder(as_path(folder, "the folder of the head"))
    where, config = source.inside(CONFIG), source.json(CONFIG)
    if config is None:
        raise ImportRefused(f"{where} is missing: {instead(source.path)}give the folder that the probe was saved to")
    layer = field(config, "layer_idx", int, where)
    if layer < 0:
        raise ImportRefused(f"{where}: layer_idx is {layer}: a layer is counted from 0")
    heads = [source.inside(name) for name in HEADS if source.inside(name).is_file()]
    if not heads:
        raise ImportRefused(
            f"{source.path} holds none of {', '.join(HEADS)}: give the folder that the probe was saved to"
        )
    if len(heads) > 1:
        raise ImportRefused(
            f"{source.path} holds {' and '.join(path.name for path in heads)}: which is the head is unknown, so move"
            " the other one away"
        )
    [head] = heads
    state = load_state_dict(head)
    only_tensors(state, ("weight", "bias"), head)
    weight, bias = (tensor_of(state, name, head) for name in ("weight", "bias"))
    size = field(config, "hidden_size", int, where, weight.shape[-1] if weight.dim() else 0)
    if weight.numel() != size:
        raise ImportRefused(f"{head}: weight has shape {tuple(weight.shape)}, {CONFIG} says {size} values to one logit")
    adapted = source.json(ADAPTER) is not None
    notes = ["Trained together with a LoRA: its scores are for a model with that adapter active."] if adapted else []
    files = {path.name: sha256(path) for path in (where, head)}
    return write_flat(
        target,
        [linear(concept, weight, bias)],
        source="a hallucination head",
        site=f"resid_post.{layer}",
        normalize=normalize,
        adapters=("default",) if adapted else (),
        notes=notes,
        stated={"layer_idx": layer},
        files=files,
        **about,
    )
