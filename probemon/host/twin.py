"""Twin: a tiny model of the same class, for trials that must not touch the watched model.

    config = shrunken(model.config)         # every kind of layer, 32 values wide
    model = twin(type(model), config)       # random weights on the CPU

Abilities depend on code and kinds of layers, not on size. Global randomness is not used.
"""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager
from typing import Any

import torch

from probemon.host.internals import intercept_operators, with_generator

WIDTH, VOCABULARY, N_LAYERS, MOST_LAYERS = 32, 97, 3, 6
MOST_PARAMETERS = 100_000_000  # larger twins are not tried
UNCROSSED = 64  # a window longer than any trial
_LENGTHS = "num_hidden_layers n_layer n_layers num_layers decoder_layers num_decoder_layers encoder_layers"
_LENGTHS += " num_encoder_layers depth"
_NAMES: dict[float, str] = {  # configurations' names of sizes, by their small value
    32: (
        "hidden_size d_model n_embd dim_model word_embed_proj_dim embedding_size emb_dim embedding_dim lru_width "
        "attention_hidden_size input_embedding_size output_embedding_size hidden_size_global "
        "cross_attention_hidden_size out_hidden_size output_size index_n_heads"
    ),
    48: (
        "intermediate_size moe_intermediate_size shared_expert_intermediate_size shared_experts_intermediate_size "
        "shared_intermediate_size encoder_ffn_dim decoder_ffn_dim ffn_dim d_ff dim_ff dff n_inner ffn_hidden_size "
        "feed_forward_size d_inner mlp_dim intermediate_size_mlp expert_ffn_hidden_size dense_intermediate_size "
        "moe_shared_expert_intermediate_size router_hidden_size"
    ),
    4: (
        "num_attention_heads encoder_attention_heads decoder_attention_heads n_head n_heads attention_heads "
        "swa_num_attention_heads num_encoder_attention_heads num_decoder_attention_heads linear_num_heads "
        "linear_num_value_heads qk_rope_head_dim rotary_dim state_size ssm_state_size mamba_d_state "
        "time_step_rank mamba_dt_rank d_rel num_experts num_local_experts n_routed_experts moe_num_experts "
        "chunk_size mamba_chunk_size index_topk_blocks index_block_size"
    ),
    2: (
        "num_key_value_heads num_kv_heads swa_num_key_value_heads linear_num_key_heads num_query_groups kv_n_heads "
        "n_groups mamba_n_groups mamba_ngroups o_groups num_experts_per_tok num_experts_per_token moe_k moe_topk "
        "moe_top_k zero_expert_num attn_layer_period expert_layer_period block_size"
    ),
    8: (
        "num_heads mamba_n_heads mamba_num_heads n_mamba_heads head_dim global_head_dim dim_head d_kv d_head "
        "mamba_d_head mamba_head_dim mamba_headdim swa_head_dim attention_head_size kv_channels "
        "linear_key_head_dim linear_value_head_dim linear_head_dim v_head_dim qk_nope_head_dim "
        "query_pre_attn_scalar index_head_dim indexer_head_dim attention_head_dim adapter_rank laurel_rank "
        "attention_window patch_size"
    ),
    64: "mamba_d_ssm",
    12: "qk_head_dim",
    16: "kv_lora_rank q_lora_rank o_lora_rank image_size",
    1: "n_group topk_group attn_layer_offset expert_layer_offset num_random_blocks",
    97: "vocab_size decoder_vocab_size vocab_size_per_layer_input src_vocab_size tgt_vocab_size unpadded_vocab_size",
    128: (
        "max_position_embeddings n_positions n_ctx max_seq_len context_length max_target_positions "
        "max_source_positions original_max_position_embeddings max_encoder_position_embeddings "
        "max_decoder_position_embeddings"
    ),
    0.3: "initializer_range init_std",
}
SIZES: dict[str, float] = {name: size for size, names in _NAMES.items() for name in names.split()}
_WINDOWS = (
    "sliding_window",
    "sliding_window_size",
    "attention_window_size",
    "local_attention",
    "attention_chunk_size",
    "keep_window_size",
    "window_size",
    "index_topk",  # the number of tokens that attention selects
)
_INNER_WIDTHS = (("expand", "num_heads", "head_dim"), ("mamba_expand", "mamba_n_heads", "mamba_d_head"))


def shrunken(config: Any, window: int = UNCROSSED, **changes: Any) -> Any:
    """Return a small configuration with every kind of layer; `changes` apply to its text part.

    `window`: the longest attention window; `UNCROSSED` sets all of them.
    """
    data = config.to_dict()
    small = _shrunken(config, data, {**SIZES, **dict.fromkeys(_WINDOWS, window)})
    for name, part in data.items():
        inner = vars(config).get(name)
        if hasattr(inner, "to_dict") and isinstance(part, dict):
            small[name] = shrunken(inner, window).to_dict()
    part = small["text_config"] if isinstance(small.get("text_config"), dict) else small
    part.update(changes)
    return type(config).from_dict(small)


def window_of(config: Any) -> int | None:
    """Return the shortest attention window, or None."""
    # Not to_dict(), which copies: every plain forward calls this.
    values = vars(config)
    parts = [vars(part) if hasattr(part, "to_dict") else part for part in values.values()]
    parts = [part for part in parts if isinstance(part, dict)]
    return min(
        (part[name] for part in (values, *parts) for name in _WINDOWS if _is_number(part.get(name))), default=None
    )


def _shrunken(config: Any, data: dict[str, Any], sizes: dict[str, Any]) -> dict[str, Any]:
    small = copy.deepcopy(data)
    if _is_number(data.get("qk_rope_head_dim")):  # latent attention: keys per head, partly rotated
        sizes |= {"num_key_value_heads": 4, "head_dim": sizes["qk_rope_head_dim"]}
    if "n_mamba_heads" in data:  # zamba's attention reads two streams
        sizes |= {"attention_hidden_size": 2 * WIDTH, "attention_head_dim": 2 * WIDTH // 4, "num_key_value_heads": 4}
    names = [name for name in _LENGTHS.split() if isinstance(data.get(name), int)]
    n_layers = max((int(data[name]) for name in names), default=0)
    chosen = _layers(data, n_layers)
    common_names = {name_here: name for name, name_here in (getattr(config, "attribute_map", None) or {}).items()}
    for name, value in data.items():
        size = sizes.get(name, sizes.get(common_names.get(name, "")))
        if name in names:
            small[name] = len(chosen)
        elif size is not None and (
            _is_number(value) or (value is None and name in ("head_dim", "num_key_value_heads"))
        ):
            whole = isinstance(value, int) and not (name in _WINDOWS and size == UNCROSSED)
            small[name] = min(value, size) if whole else size
        elif name == "per_layer_config" and isinstance(value, dict):
            changed = {int(i): {key: sizes.get(key, size) for key, size in part.items()} for i, part in value.items()}
            small[name] = {str(chosen.index(i)): part for i, part in changed.items() if i in chosen}
        elif _per_layer(name, value, n_layers):
            small[name] = [sizes.get(name, value[i]) for i in chosen]
        elif _indices(name, value, n_layers):
            small[name] = [chosen.index(i) for i in value if i in chosen]
        elif name.endswith(("_token_id", "_token_index")):
            small[name] = _token(value)
    for expand, heads, head in _INNER_WIDTHS:
        if _fit(data, expand, heads, head) and not _fit(small, expand, heads, head):
            small[heads] = int(small["hidden_size"] * small[expand]) // small[head]
    small["dtype"] = None
    small.pop("quantization_config", None)
    return small


def _fit(data: dict[str, Any], *names: str) -> bool:
    """True if heads fill a recurrent layer's width."""
    sizes: list[Any] = [data.get(name) for name in ("hidden_size", *names)]
    return all(map(_is_number, sizes)) and sizes[0] * sizes[1] == sizes[2] * sizes[3]


def _layers(data: dict[str, Any], n: int) -> list[int]:
    """The first layer of each kind, then up to three."""
    lists = [value for name, value in data.items() if _per_layer(name, value, n)]
    members = [set(value) for name, value in data.items() if _indices(name, value, n)]
    settings = {int(i): part for i, part in (data.get("per_layer_config") or {}).items()}
    kinds: dict[str, list[int]] = {}
    for i in range(n):
        kind = repr([value[i] for value in lists] + [i in value for value in members] + [settings.get(i)])
        kinds.setdefault(kind, []).append(i)
    chosen = {same[0] for same in list(kinds.values())[:MOST_LAYERS]}
    # Rarer kinds may share weights.
    for i in (i for same in reversed(kinds.values()) for i in same[1:]):
        if len(chosen) >= min(n, N_LAYERS):
            break
        chosen.add(i)
    return sorted(chosen)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _per_layer(name: str, value: Any, n: int) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == n > 0 and "label" not in name


def _indices(name: str, value: Any, n: int) -> bool:
    return (
        isinstance(value, (list, tuple))
        and bool(value)
        and all(isinstance(i, int) and not isinstance(i, bool) for i in value)
        and name.endswith(("layers", "idxs", "_ids", "_indices"))
        and "token" not in name
        and list(value) == sorted(set(value))
        and value[-1] < n
    )


def _token(value: Any) -> Any:
    if isinstance(value, list):
        return [_token(item) for item in value]
    return VOCABULARY - 1 - value % 16 if isinstance(value, int) and value >= VOCABULARY else value


def own_randomness(seed: int) -> AbstractContextManager[Any]:
    """Draw this thread's random numbers from a separate generator."""
    generator = torch.Generator().manual_seed(seed)

    def run(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.Tag.nondeterministic_seeded in operator.tags and kwargs.get("generator") is None:
            variant = with_generator(operator)
            if variant is not None:
                operator, kwargs["generator"] = variant, generator
        return operator(*args, **kwargs)

    return intercept_operators(run)


def twin(kind: type, config: Any, seed: int = 0) -> Any:
    """Return a model of class `kind`, fp32 on the CPU, with random weights large enough to matter.

    Raises `ValueError` above `MOST_PARAMETERS`.
    """
    with torch.device("meta"), own_randomness(seed):
        n_parameters = sum(parameter.numel() for parameter in kind(copy.deepcopy(config)).parameters())
    if n_parameters > MOST_PARAMETERS:
        raise ValueError(
            f"{kind.__name__} has {n_parameters:,} parameters even when it is made small, more than {MOST_PARAMETERS:,}"
        )
    config = copy.deepcopy(config)
    with torch.device("cpu"), own_randomness(seed), torch.no_grad():
        model = kind(config)
        model = model.to(torch.float32).eval()
        for parameter in model.parameters():
            if parameter.dim() >= 2 and parameter.is_floating_point():
                spread = float(parameter.std())
                if spread == 0:
                    parameter.normal_(0, 0.3)
                elif spread < 0.3:
                    parameter.mul_(0.3 / spread)
        _fill_zeros(model)
    return model


def _fill_zeros(model: Any) -> None:
    """Randomise padding embeddings and biases: zeros hide padding."""
    for module in model.modules():
        padding = getattr(module, "padding_idx", None)
        if isinstance(module, torch.nn.Embedding) and isinstance(padding, int):
            module.weight[padding].normal_(0, 0.3)
        bias = getattr(module, "bias", None)
        if isinstance(bias, torch.nn.Parameter) and bias.is_floating_point() and not bool(bias.any()):
            bias.normal_(0, 0.1)
