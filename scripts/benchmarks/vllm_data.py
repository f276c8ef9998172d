"""Prompts, hosts and packs for the evidence on vLLM.

prompts(tokenizer, [3, 17, 608])                # ids; the same each time
cut_host(folder, whole, n_layers=2)             # a folder with the first layers of a model
random_pack(folder, 576, 32, "resid_post.1")    # random probes, called random
deployment(folder, pack, rules)                 # a deployment file
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from probemon.util.files import sha256, write_text_atomically

ROOT = Path(__file__).resolve().parents[2]
LENGTHS = (3, 17, 40, 64, 65, 130, 257, 301, 450, 608)  # ten at once, of which the last is ten chunks
SHORTER = (3, 17, 40, 64, 65, 70, 90, 130)


def prompts(tokenizer: Any, lengths: tuple[int, ...]) -> list[list[int]]:
    """Return prompts of these lengths, each from another place of a text."""
    text = Path(__file__).with_name("vllm_prompts.txt").read_text(encoding="utf-8")
    ids = tokenizer(text)["input_ids"]
    ids = ids * (1 + max(lengths) * 2 // len(ids))
    return [ids[31 * i : 31 * i + length] for i, length in enumerate(lengths)]


def cut_host(folder: Path, whole: Path, n_layers: int) -> Path:
    """Write the first layers of a model with its embeddings and head, once; return the folder."""
    if not (folder / "config.json").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        for file in whole.glob("tokenizer*"):
            shutil.copy(file, folder / file.name)
        for name in ("chat_template.jinja", "generation_config.json"):
            shutil.copy(whole / name, folder / name)
        weights = load_file(whole / "model.safetensors")
        kept = {
            name: tensor
            for name, tensor in weights.items()
            if ".layers." not in name or int(name.split(".layers.")[1].split(".")[0]) < n_layers
        }
        save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((whole / "config.json").read_text(encoding="utf-8"))
        config["num_hidden_layers"] = n_layers
        if "layer_types" in config:
            config["layer_types"] = config["layer_types"][:n_layers]
        write_text_atomically(folder / "config.json", json.dumps(config, indent=1))
    return folder


def random_host(folder: Path, whole: Path, *, hidden_size: int, heads: int) -> Path:
    """Write a random host of two layers with the vocabulary and tokenizer of another, once; return the folder."""
    from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

    if not (folder / "config.json").is_file():
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=AutoConfig.from_pretrained(whole).vocab_size,
            hidden_size=hidden_size,
            intermediate_size=2 * hidden_size,
            num_hidden_layers=2,
            num_attention_heads=heads,
            num_key_value_heads=heads // 2,
            initializer_range=0.1,
        )
        LlamaForCausalLM(config).save_pretrained(folder)
        for file in (*whole.glob("tokenizer*"), whole / "chat_template.jinja"):
            shutil.copy(file, folder / file.name)
    return folder


def random_pack(folder: Path, hidden: int, n: int, site: str) -> Path:
    """Write a pack of random linear probes without a hierarchy, once; return the folder."""
    from probemon.lab.importers.generic import import_weights

    if not (folder / "manifest.json").is_file():
        random = np.random.default_rng(0)
        probes = {
            f"random{i}": (torch.tensor(random.normal(size=hidden) / hidden**0.5, dtype=torch.float32), 0.0)
            for i in range(n)
        }
        import_weights(probes, folder, site=site, normalize="rmsnorm", overwrite=True)
    return folder


def deployment(file: Path, pack: Path, rules: list[dict[str, Any]], **more: Any) -> Path:
    """Write a deployment of one pack; return the file."""
    content = {
        "deployment": 1,
        "packs": [{"pack": str(pack), "manifest_sha256": sha256(pack / "manifest.json")}],
        "rules": rules,
        **more,
    }
    write_text_atomically(file, json.dumps(content, indent=1))
    return file
