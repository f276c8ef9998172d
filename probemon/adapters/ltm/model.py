"""LtmForCausalLM: a small decoder with windowed attention and memory slots.

    model = LtmForCausalLM(LtmConfig(vocab_size=64))
    model.generate(ids)                             # every mode that removes no token
    model.get_memory_stats()

A model to watch, small enough to be trained in minutes. It claims no quality as a language model.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import DynamicCache, PreTrainedModel
from transformers.generation import GenerationMixin
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb
from transformers.models.phi3.modeling_phi3 import Phi3MLP

from probemon.adapters.ltm.cache import NO_BATCHES, PACKED, memory_layer, memory_of, padding_before
from probemon.adapters.ltm.config import LtmConfig
from probemon.adapters.ltm.memory import SlotMemory
from probemon.adapters.ltm.state import MemoryState
from probemon.adapters.ltm.stats import stats_of
from probemon.errors import ConfigError, UnsupportedDecoding
from probemon.host.internals import CACHE_NAME, cache_among


class LtmAttention(nn.Module):
    """Attention with rotary positions."""

    def __init__(self, config: LtmConfig) -> None:
        super().__init__()
        self.config, self.n_heads = config, config.num_attention_heads
        self.qkv_proj = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=False)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, hidden: Tensor, rotation: tuple[Tensor, Tensor], mask: Tensor, layer: Any) -> Tensor:
        """Attend from `hidden [B, T, D]` within `mask [B, 1, T, S]`."""
        b, t, d = hidden.shape
        query, key, value = self.qkv_proj(hidden).view(b, t, 3, self.n_heads, -1).permute(2, 0, 3, 1, 4)
        query, key = apply_rotary_pos_emb(query, key, *rotation)
        if layer is not None:
            key, value = layer.update(key, value)
        if self.config._attn_implementation == "eager":
            logits = (query @ key.transpose(2, 3)).float() * query.shape[-1] ** -0.5
            attended = logits.masked_fill(~mask, -torch.inf).softmax(-1).to(value.dtype) @ value
        else:
            attended = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return self.o_proj(attended.transpose(1, 2).reshape(b, t, d))


class LtmDecoderLayer(GradientCheckpointingLayer):
    """Attention, optional memory, feed-forward."""

    def __init__(self, config: LtmConfig, number: int) -> None:
        super().__init__()
        self.number = number
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = LtmAttention(config)
        self.memory: SlotMemory | None = None
        if number in config.memory_layers:
            self.memory_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
            self.memory = SlotMemory(config.memory_shape())
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = Phi3MLP(config)

    def forward(
        self,
        hidden: Tensor,
        rotation: tuple[Tensor, Tensor],
        mask: Tensor,
        valid: Tensor,
        ids: Tensor | None = None,
        layer: Any = None,
    ) -> Tensor:
        """Return the stream after this layer; updates the cache's `layer`."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), rotation, mask, layer)
        if self.memory is not None:
            state = None if layer is None else layer.memory
            remembered = self.memory(self.memory_layernorm(hidden), state, valid, ids, hidden)
            if layer is not None:
                layer.memory = remembered.state
            hidden = hidden + remembered.update
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class LtmPreTrainedModel(PreTrainedModel):
    """Initial weights and transformers settings."""

    config_class = LtmConfig
    config: LtmConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["LtmDecoderLayer"]  # noqa: RUF012
    _supports_sdpa = True
    _is_stateful = True  # so generate() refuses an assistant

    @torch.no_grad()
    def _init_weights(self, module: Any) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            # Narrow layers need the fan-in.
            std = module.weight.shape[1] ** -0.5 if isinstance(module, nn.Linear) else self.config.initializer_range
            nn.init.normal_(module.weight, 0.0, std)
            bias = getattr(module, "bias", None)
            if isinstance(bias, nn.Parameter):
                nn.init.zeros_(bias)
        elif isinstance(module, LlamaRMSNorm):
            nn.init.ones_(module.weight)
        elif isinstance(module, SlotMemory):
            nn.init.constant_(module.log_sharpness, 10.0).log_()
            nn.init.zeros_(module.null_logit)
            nn.init.zeros_(module.surprise_weight)


class LtmModel(LtmPreTrainedModel):
    """The decoder: embeddings, layers, a norm."""

    def __init__(self, config: LtmConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(LtmDecoderLayer(config, number) for number in range(config.num_hidden_layers))
        self.norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.newest: dict[int, MemoryState] = {}  # after the newest forward outside training
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Run T tokens of B rows. `cache` and `past_key_values` are one argument, by its newer and older name.

        Raises `UnsupportedDecoding` for unsupported inputs.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ConfigError("give either input_ids or inputs_embeds")
        if output_attentions:
            raise UnsupportedDecoding(
                "output_attentions is not supported: what a memory reads is in get_memory_stats() and in the records of"
                " routing (docs/memory-and-routing.md)"
            )
        hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        b, t, _ = hidden.shape
        use_cache = self.config.use_cache if use_cache is None else use_cache
        if self.training and any(layer.gradient_checkpointing for layer in self.layers):
            use_cache = False  # checkpointed layers would write again
        cache = past_key_values if cache is None else cache
        if cache is None and use_cache:
            cache = DynamicCache(config=self.config)
        layers: list[Any] = [None] * len(self.layers)
        n_past = 0
        if cache is not None:
            layers = [memory_layer(cache, number) for number in range(len(self.layers))]
            n_past = layers[0].get_seq_length()
        past_padding = None if layers[0] is None else layers[0].padding
        padding = padding_before(attention_mask, past_padding, b, n_past, t, hidden.device)
        columns = n_past + torch.arange(t, device=hidden.device)
        positions = columns - padding[:, None]
        valid = positions >= 0
        _check_positions(position_ids, positions, valid)
        for layer in layers:
            if layer is not None:
                layer.padding = padding
        window = self.config.sliding_window
        keys = torch.arange(max(0, n_past - window + 1), n_past + t, device=hidden.device)
        near = (keys <= columns[:, None]) & (keys > columns[:, None] - window)
        real = keys >= padding[:, None]
        # Padding sees itself, else it is NaN.
        mask = near & (real[:, None] | (keys == columns[:, None]))
        rotation = self._rotation(positions.clamp_min(0), hidden.dtype)
        states = [hidden]
        for block, layer in zip(self.layers, layers, strict=True):
            hidden = block(hidden, rotation, mask[:, None], valid, input_ids, layer)
            states.append(hidden)
        hidden = self.norm(hidden)
        if not self.training:
            self.newest = memory_of(cache)
        return BaseModelOutputWithPast(
            last_hidden_state=hidden,
            hidden_states=(*states[:-1], hidden) if output_hidden_states else None,
            **{CACHE_NAME: cache if use_cache else None},
        )

    def _rotation(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        size = self.config.hidden_size // self.config.num_attention_heads
        steps = torch.arange(0, size, 2, device=positions.device).float() / size
        angles = positions[..., None].float() * self.config.rope_theta**-steps
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos().to(dtype), angles.sin().to(dtype)


class LtmForCausalLM(LtmPreTrainedModel, GenerationMixin):
    """`LtmModel` with a language-model head."""

    def __init__(self, config: LtmConfig) -> None:
        super().__init__(config)
        self.model = LtmModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cache: Any = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Return logits `[B, T, V]`, and the loss if there are labels."""
        output = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
            **{CACHE_NAME: past_key_values if cache is None else cache},
        )
        selection = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(output.last_hidden_state[:, selection])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, hidden_states=output.hidden_states, **{CACHE_NAME: cache_among(output)}
        )

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises `UnsupportedDecoding`: requests would share a row's memory."""
        raise UnsupportedDecoding(NO_BATCHES)

    @property
    def memories(self) -> dict[int, SlotMemory]:
        """Memory modules by layer."""
        return {layer.number: layer.memory for layer in self.model.layers if layer.memory is not None}

    def get_memory_stats(self, past_key_values: Any = None) -> dict[str, Any]:
        """Return metrics (docs/memory-and-routing.md) of a cache's memory, or after the newest forward.

        They are means; `memories` has each row of each layer. Beams of `generate` are rows. Raises `ConfigError` if
        there is no memory.
        """
        states = self.model.newest if past_key_values is None else memory_of(past_key_values)
        return stats_of(states, self.memories)

    def reduce_slots(self, n_slots: int, past_key_values: Any = None) -> None:
        """Keep the strongest slots of a cache, or shrink new memories."""
        self._resize(n_slots, past_key_values, lambda state: state.reduced(n_slots, self.config.decay))

    def grow_slots(self, n_slots: int, past_key_values: Any = None) -> None:
        """Add empty slots to a cache, or enlarge new memories."""
        self._resize(n_slots, past_key_values, lambda state: state.grown(n_slots))

    def _resize(self, n_slots: int, cache: Any, resized: Any) -> None:
        if cache is not None:
            for number in memory_of(cache):
                layer = memory_layer(cache, number)
                layer.memory = resized(layer.memory)
            self.model.newest = memory_of(cache)
            return
        self.config.memory_slots = n_slots
        shape = self.config.memory_shape()
        for memory in self.memories.values():
            memory.shape = shape


def _check_positions(position_ids: Tensor | None, positions: Tensor, valid: Tensor) -> None:
    if position_ids is None:
        return
    position_ids = position_ids.to(positions.device).expand_as(positions)
    if not bool(((position_ids == positions) | ~valid).all()):
        raise UnsupportedDecoding(PACKED)
