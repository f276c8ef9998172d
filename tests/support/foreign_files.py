"""Files as other projects write them, of random probes, each with what it computes in fp64: `score(states [N, D]) ->
[N]`.
"""

import enum
import json
import sys
import types

import numpy as np
import torch
from safetensors.torch import save_file

D = 12


def random(*shape, seed=0, scale=0.5):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def states(n=64, d=D, seed=99):
    """States away from 0, as hidden states are, some values much larger than others."""
    return random(n, d, seed=seed, scale=1.0) * torch.linspace(0.3, 3, d) + torch.linspace(-2, 2, d)


def _saved(path, kind, state, **init_kwargs):
    """What `save` of a probelab probe writes."""
    record = {
        "class": kind,
        "init_kwargs": init_kwargs,
        "seed": 0,
        "device": "cpu",
        "cast": None,
        "training_dtype": "torch.float32",
        "state_dict": state,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(record, path)


def probelab_logistic(path, seed=0):
    state = {
        "scaler_mean": random(D, seed=seed, scale=2),
        "scaler_std": random(D, seed=seed + 1).abs() + 0.2,
        "linear.weight": random(1, D, seed=seed + 2),
        "linear.bias": random(1, seed=seed + 3),
    }
    _saved(path, "Logistic", state, C=1.0, max_iter=500, n_epochs=100, batch_size=8192)
    mean, std, weight, bias = (value.double() for value in state.values())
    return lambda x: torch.sigmoid(((x.double() - mean) / std) @ weight[0] + bias)


def probelab_mass_mean(path, seed=10):
    state = {
        "direction": random(D, seed=seed),
        "bias": random(1, seed=seed + 1),
        "global_mean": random(D, seed=seed + 2, scale=2),
    }
    _saved(path, "MassMean", state, normalize=False, center=True)
    direction, bias, mean = (value.double() for value in state.values())
    return lambda x: torch.sigmoid((x.double() - mean) @ direction + bias)


def probelab_mlp(path, seed=20, activation="relu"):
    state = {
        "fc1.weight": random(7, D, seed=seed),
        "fc1.bias": random(7, seed=seed + 1),
        "fc2.weight": random(1, 7, seed=seed + 2),
        "fc2.bias": random(1, seed=seed + 3),
    }
    _saved(
        path,
        "MLP",
        state,
        hidden_dim=7,
        dropout=None,
        activation=activation,
        learning_rate=1e-3,
        weight_decay=0.01,
        n_epochs=100,
        batch_size=32,
    )
    w1, b1, w2, b2 = (value.double() for value in state.values())
    return lambda x: torch.sigmoid((x.double() @ w1.T + b1).relu() @ w2[0] + b2)


def probelab_eemlp(path, seed=30, n_layers=2):
    state = {"scaler_mean": random(D, seed=seed, scale=2), "scaler_std": random(D, seed=seed + 1).abs() + 0.2}
    widths = [D] + [5] * n_layers
    for i in range(n_layers):
        state |= {
            f"layers.{i}.0.weight": random(5, widths[i], seed=seed + 2 + i),
            f"layers.{i}.0.bias": random(5, seed=seed + 12 + i),
        }
    for i, width in enumerate(widths):
        state |= {
            f"heads.{i}.weight": random(1, width, seed=seed + 22 + i),
            f"heads.{i}.bias": random(1, seed=seed + 32 + i),
        }
    _saved(
        path,
        "EEMLP",
        state,
        n_layers=n_layers,
        hidden_dim=5,
        dropout=0.1,
        learning_rate=1e-3,
        weight_decay=0.01,
        n_epochs=20,
        batch_size=1024,
    )
    state = {name: value.double() for name, value in state.items()}

    def score(x):
        h = (x.double() - state["scaler_mean"]) / state["scaler_std"]
        for i in range(n_layers):
            h = (h @ state[f"layers.{i}.0.weight"].T + state[f"layers.{i}.0.bias"]).relu()
        return torch.sigmoid(h @ state[f"heads.{n_layers}.weight"][0] + state[f"heads.{n_layers}.bias"])

    return score


def probekit_dict(seed=40, normalized=True):
    """A probe's `to_dict()` and its score; one value of the state never varied, whose deviation is 0."""
    weights, mean, std = random(D, seed=seed), random(D, seed=seed + 1, scale=2), random(D, seed=seed + 2).abs() + 0.2
    std[3] = 0.0
    norm = {"mean": mean.tolist(), "std": std.tolist(), "count": 100} if normalized else None
    divisor = torch.where(std == 0, 1.0, std).double()

    def score(x):
        z = (x.double() - mean.double()) / divisor if normalized else x.double()
        return torch.sigmoid(z @ weights.double() + 0.25)

    return {
        "weights": weights.tolist(),
        "bias": 0.25,
        "normalization": norm,
        "metadata": {"solver": "LogisticRegression"},
    }, score


def steerkit_probe(path, seed=50, layer=2, n_layers=4, length=3.0, **changes):
    """Directions of length 1, biases of coefficients of length `length`: the score is the fit's for that scale."""
    directions = {name: random(D, seed=seed + i) for i, name in enumerate(("logistic", "diff_of_means", "mass_mean"))}
    directions = {name: value / value.norm() for name, value in directions.items()}
    bias = {"logistic": 0.4, "diff_of_means": 0.0, "mass_mean": -0.3}
    metadata = {
        "schema_version": "3",
        "layer": str(layer),
        "n_total_layers": str(n_layers),
        "normalized_depth": "0.500000",
        "model_id": "tiny",
        "hook_site": "resid_post",
        "hook_name": f"blocks.{layer}.hook_{changes.get('hook_site', 'resid_post')}",
        "default_method": "logistic",
        "auto_alpha": "",
        "bias_json": json.dumps(bias),
        "metrics_json": "{}",
        "created_at": "",
        "extras_json": "{}",
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(
        {f"direction.{name}": value for name, value in directions.items()}, path, metadata={**metadata, **changes}
    )
    return lambda x, method="logistic", scale=length, shift=True: torch.sigmoid(
        scale * (x.double() @ directions[method].double()) + shift * bias[method]
    )


def sae(folder, architecture="standard", seed=60, n_features=9, dtype=torch.float32, metadata=None, **config):
    """What `save_model` writes, and the encoder's activations `encode(states) -> [N, F]` in fp64; `metadata`: changes
    to it, None to leave a field out.
    """
    d = D
    tensors = {
        "W_enc": random(d, n_features, seed=seed),
        "W_dec": random(n_features, d, seed=seed + 1),
        "b_dec": random(d, seed=seed + 2),
    }
    if architecture == "gated":
        tensors |= {
            "b_gate": random(n_features, seed=seed + 3),
            "b_mag": random(n_features, seed=seed + 4),
            "r_mag": random(n_features, seed=seed + 5),
        }
    else:
        tensors |= {"b_enc": random(n_features, seed=seed + 3)}
    if "jumprelu" in architecture:
        tensors["threshold"] = random(n_features, seed=seed + 6).abs() * torch.linspace(0, 40, n_features)
        tensors["threshold"][0] = -1.0
    if (
        "transcoder" in architecture
    ):  # which writes to another site, here a wider one, and subtracts nothing from what it reads
        tensors |= {"W_dec": random(n_features, d + 3, seed=seed + 1), "b_dec": random(d + 3, seed=seed + 2)}
        config = {"apply_b_dec_to_input": False, **config}
    tensors = {name: value.to(dtype) for name, value in tensors.items()}
    said = {
        "d_in": d,
        "d_sae": n_features,
        "dtype": str(dtype).removeprefix("torch."),
        "device": "cpu",
        "apply_b_dec_to_input": True,
        "normalize_activations": "none",
        "reshape_activations": "none",
        "architecture": architecture,
        "metadata": {
            "sae_lens_version": "6.54.12",
            "model_name": "tiny",
            "hook_name": "blocks.2.hook_resid_pre",
            "hook_head_index": None,
            "model_from_pretrained_kwargs": {},
        },
    } | config
    said["metadata"] = {
        name: value for name, value in {**said["metadata"], **(metadata or {})}.items() if value is not None
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cfg.json").write_text(json.dumps(said))
    save_file(tensors, folder / "sae_weights.safetensors")
    t = {name: value.double() for name, value in tensors.items()}

    def encode(x):
        x = x.double()
        if said["normalize_activations"] == "layer_norm":
            x = x - x.mean(-1, keepdim=True)
            x = x / (x.std(-1, keepdim=True) + 1e-5)
        elif said["normalize_activations"] == "constant_norm_rescale":
            x = x * d**0.5 / x.norm(dim=-1, keepdim=True)
        x = x - t["b_dec"] if said["apply_b_dec_to_input"] else x
        if architecture == "gated":
            return (x @ t["W_enc"] + t["b_gate"] > 0) * (x @ (t["W_enc"] * t["r_mag"].exp()) + t["b_mag"]).relu()
        pre = x @ t["W_enc"] + t["b_enc"]
        return pre.relu() * (pre > t["threshold"]) if "jumprelu" in architecture else pre.relu()

    return encode


def hallucination_head(folder, seed=70, layer=3, dtype=torch.bfloat16, lora=True, file="probe_head.bin"):
    """What `ValueHeadProbe.save` writes; the score of states that are already of the head's dtype."""
    state = {"weight": random(1, D, seed=seed).to(dtype), "bias": random(1, seed=seed + 1).to(dtype)}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "probe_config.json").write_text(
        json.dumps({"target_layer_name": "LlamaDecoderLayer", "layer_idx": layer, "hidden_size": D})
    )
    if lora:
        (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    if file.endswith(".bin"):
        torch.save(state, folder / file)
    else:
        save_file(state, folder / file)
    return lambda x: torch.sigmoid(x.double() @ state["weight"][0].double() + state["bias"].double())


SHAPES = {"dim": "DIFFERENCE_IN_MEANS", "lr": "LOGISTIC_REGRESSION", "mlp": "MULTI_LAYER_PERCEPTRON"}
_PRIVATE = "deception.detectors.utils.types"


def private_enum(monkeypatch):
    """The enum that published lie-detectors checkpoints pickle, in a module of that name."""
    for name in ("deception", "deception.detectors", "deception.detectors.utils", _PRIVATE):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    shape = enum.Enum("ProbeArchitecture", {member: value for value, member in SHAPES.items()}, type=str)
    shape.__module__ = _PRIVATE
    sys.modules[_PRIVATE].ProbeArchitecture = shape
    return shape


def lie_detector(path, shape, kind="lr", layer=1, threshold=0.7, seed=70, d=D, state=None, **settings):
    """A checkpoint as published, of an enum `shape` (None: a text); returns its score, as the package computes it."""
    tensors = {
        "dim": {"direction": random(d, seed=seed)},
        "lr": {"linear.weight": random(1, d, seed=seed + 1), "linear.bias": random(1, seed=seed + 2)},
        "mlp": {
            "net.0.weight": random(7, d, seed=seed + 3),
            "net.0.bias": random(7, seed=seed + 4),
            "net.2.weight": random(1, 7, seed=seed + 5),
            "net.2.bias": random(1, seed=seed + 6),
        },
    }[kind]
    mean, std = random(d, seed=seed + 7, scale=2), random(d, seed=seed + 8).abs() + 0.2
    standard = {} if kind == "dim" else {"dataset_mean": mean, "dataset_std": std}
    settings = {"probe_architecture": shape(kind) if shape else kind, "layer": layer, "layer_pct": 60} | settings
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {**tensors, **standard, "threshold": torch.tensor(threshold), **(state or {})}
    torch.save({"state_dict": state, "hyperparams": settings}, path)

    def score(x):
        if kind == "dim":
            return x.double() @ tensors["direction"].double()
        x = (x.double() - mean.double()) / std.double()
        if kind == "mlp":
            x = torch.relu(x @ tensors["net.0.weight"].double().T + tensors["net.0.bias"].double())
        weight, bias = list(tensors.values())[-2:]
        return x @ weight[0].double() + bias.double()

    return score


def control_vector(path, layers, seed=80, d=D, arch="controlvector", dtype=np.float32, names="direction.{}"):
    """A control vector as repeng's export_gguf writes it; returns the directions by layer."""
    import gguf

    directions = {layer: (random(d, seed=seed + layer).numpy() * (1 + layer)).astype(dtype) for layer in layers}
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, arch)
    writer.add_string(f"{arch}.model_hint", "llama")
    writer.add_uint32(f"{arch}.layer_count", len(directions))
    for layer, direction in directions.items():
        writer.add_tensor(names.format(layer), direction)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return directions
