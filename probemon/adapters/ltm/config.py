"""Settings of a model with memory slots, and of one memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig

from probemon.errors import ConfigError
from probemon.util.checks import check_count, check_number


@dataclass(frozen=True)
class MemoryShape:
    """Sizes of one memory, and how it writes and forgets.

    - `memory_dim`: of keys and values.
    - `segment`: real tokens between writes.
    - `compression`: largest share of a segment that is written.
    - `adaptive_mass`: write only tokens with this share of the segment's gate.
    - `decay`: of a slot's strength per segment.
    - `detach_every`: segments between gradient cuts; 0 for none.
    """

    hidden_size: int
    memory_dim: int = 24
    slots: int = 40
    segment: int = 12
    compression: float = 0.67
    adaptive_mass: float = 1.0
    decay: float = 1.0
    detach_every: int = 0

    def __post_init__(self) -> None:
        for name in ("hidden_size", "memory_dim", "slots", "segment"):
            check_count(name, getattr(self, name), least=1)
        check_count("detach_every", self.detach_every)
        for name in ("compression", "adaptive_mass", "decay"):
            check_number(
                name, getattr(self, name), low=0, high=1, open_low=True, remedy="give more than 0 and at most 1"
            )

    @property
    def most_written(self) -> int:
        """Most tokens written per segment."""
        return min(self.slots, max(1, int(self.compression * self.segment + 1e-9)))


class LtmConfig(PretrainedConfig):
    """Settings of `LtmForCausalLM`; see `MemoryShape` for its memories.

    `memory_layers`: None for the last layer, () for none.
    `sliding_window`: tokens that attention sees, itself included.
    """

    model_type = "probemon_ltm"
    keys_to_ignore_at_inference = ("cache", "past_key_values")
    hidden_act = "silu"

    def __init__(
        self,
        vocab_size: int = 64,
        hidden_size: int = 48,
        intermediate_size: int = 96,
        num_hidden_layers: int = 2,
        num_attention_heads: int = 4,
        sliding_window: int = 8,
        rope_theta: float = 10_000.0,
        rms_norm_eps: float = 1e-6,
        initializer_range: float = 0.02,
        memory_layers: Any = None,
        memory_slots: int = 40,
        memory_dim: int = 24,
        segment_size: int = 12,
        compression: float = 0.67,
        adaptive_mass: float = 1.0,
        decay: float = 1.0,
        detach_every: int = 0,
        use_cache: bool = True,
        **kwargs: Any,
    ) -> None:
        self.vocab_size = check_count("vocab_size", vocab_size, least=1)
        self.hidden_size = check_count("hidden_size", hidden_size, least=1)
        self.intermediate_size = check_count("intermediate_size", intermediate_size, least=1)
        self.num_hidden_layers = check_count("num_hidden_layers", num_hidden_layers, least=1)
        self.num_attention_heads = check_count("num_attention_heads", num_attention_heads, least=1)
        self.sliding_window = check_count("sliding_window", sliding_window, least=2)
        if hidden_size % (2 * num_attention_heads):
            raise ConfigError(
                f"hidden_size is {hidden_size}, num_attention_heads {num_attention_heads}: each head needs an even"
                " number of dimensions, so give a hidden size that is a multiple of twice the heads"
            )
        layers = [num_hidden_layers - 1] if memory_layers is None else list(memory_layers)
        for layer in layers:
            check_count("memory_layers", layer, most=num_hidden_layers - 1, remedy="name layers of the model, from 0")
        self.memory_layers = layers
        self.rope_theta, self.rms_norm_eps = rope_theta, rms_norm_eps
        self.initializer_range = initializer_range
        self.memory_slots, self.memory_dim, self.segment_size = memory_slots, memory_dim, segment_size
        self.compression, self.adaptive_mass, self.decay = compression, adaptive_mass, decay
        self.detach_every, self.use_cache = detach_every, use_cache
        self.memory_shape()
        super().__init__(**kwargs)

    def memory_shape(self) -> MemoryShape:
        """Return the shape of each memory."""
        return MemoryShape(
            hidden_size=self.hidden_size,
            memory_dim=self.memory_dim,
            slots=self.memory_slots,
            segment=self.segment_size,
            compression=self.compression,
            adaptive_mass=self.adaptive_mass,
            decay=self.decay,
            detach_every=self.detach_every,
        )
