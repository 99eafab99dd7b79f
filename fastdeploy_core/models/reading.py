"""Reads config.json with typed, checked keys: a wrong value gets an error that names its key."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fastdeploy_core.contracts.attention import AttentionSpec
from fastdeploy_core.contracts.model import ModelShapes
from fastdeploy_core.contracts.moe import MoESpec, RoutingSpec
from fastdeploy_core.errors import ConfigError, UnsupportedModel
from fastdeploy_core.layers.attention import HeadShape
from fastdeploy_core.layers.rotary import RotarySpec


class ConfigReader:
    """One model's config.json, read key by key. `keys` spell one setting, the preferred first."""

    def __init__(self, config: Mapping[str, Any], tp_size: int = 1) -> None:
        self.config = config
        self.tp_size = tp_size
        names = config.get("architectures") or ["?"]
        self.architecture = str(names[0])

    def _find(self, keys: tuple[str, ...], default: Any = None) -> Any:
        found = (self.config[key] for key in keys if self.config.get(key) is not None)
        return next(found, default)

    def _wrong(self, keys: tuple[str, ...], value: Any, expected: str) -> ConfigError:
        return ConfigError(
            f"config.json of this {self.architecture} has {' / '.join(keys)}={value!r}; "
            f"expected {expected}"
        )

    def size(self, *keys: str, default: int | None = None) -> int:
        """A whole number above 0."""
        return self._whole(keys, default, 1, "a whole number above 0")

    def count(self, *keys: str, default: int | None = None) -> int:
        """A whole number, 0 or above."""
        return self._whole(keys, default, 0, "a whole number, 0 or above")

    def _whole(self, keys: tuple[str, ...], default: int | None, least: int, expected: str) -> int:
        value = self._find(keys, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self._wrong(keys, value, expected)
        return value

    def number(self, *keys: str, default: float) -> float:
        """A number, neither infinite nor NaN."""
        value = self._find(keys, default)
        if type(value) not in (int, float) or not abs(value) < float("inf"):
            raise self._wrong(keys, value, "a finite number")
        return float(value)

    def flag(self, *keys: str, default: bool) -> bool:
        """True or false."""
        value = self._find(keys, default)
        if not isinstance(value, bool):
            raise self._wrong(keys, value, "true or false")
        return value

    def divided(self, what: str, size: int) -> int:
        """This rank's share of a size that ranks divide evenly."""
        if size % self.tp_size:
            possible = [n for n in range(1, 65) if size % n == 0]
            raise ConfigError(
                f"{what} {size} of this {self.architecture} cannot be divided among "
                f"tensor_parallel_size {self.tp_size}; possible: {', '.join(map(str, possible))}"
            )
        return size // self.tp_size

    def require_activation(self, *possible: str) -> None:
        """UnsupportedModel unless the activation is one of these, or unnamed."""
        activation = self._find(("hidden_activation", "hidden_act"))
        if activation is not None and activation not in possible:
            raise UnsupportedModel(
                f"hidden_act {activation!r} of this {self.architecture} is not supported; "
                f"possible: {', '.join(possible)}"
            )

    def head_dim(self) -> int:
        """Width of one attention head."""
        heads = self.size("num_attention_heads")
        return self.size("head_dim", default=max(1, self.size("hidden_size") // heads))

    def rotary_dim(self, *, default: float = 1.0) -> int:
        """How many dimensions of a head turn: the share that config.json names, or `default`."""
        rope = self._find(("rope_parameters", "rope_scaling")) or {}
        share = rope.get("partial_rotary_factor") if isinstance(rope, Mapping) else None
        if share is None:
            share = self.number("partial_rotary_factor", default=default)
        if not isinstance(share, int | float) or not 0 < share <= 1:
            raise self._wrong(("partial_rotary_factor",), share, "a number above 0, up to 1")
        return int(self.head_dim() * share)

    def rotary(self, dim: int, *, theta: float = 10000.0, interleaved: bool = False) -> RotarySpec:
        """Rotation of heads of width `dim`, from rope_parameters or rope_theta and rope_scaling."""
        scaling = self._find(("rope_parameters", "rope_scaling")) or {}
        if not isinstance(scaling, Mapping):
            raise self._wrong(("rope_parameters", "rope_scaling"), scaling, "an object")
        beside = self.number("rope_theta", default=theta)
        base = ConfigReader(scaling).number("rope_theta", default=beside)
        outer = ("original_max_position_embeddings",)  # Phi-3 has it beside the rule, not in it
        return RotarySpec(
            dim=dim,
            theta=base,
            interleaved=interleaved,
            max_position_embeddings=self.size("max_position_embeddings", default=2048),
            kind=str(scaling.get("rope_type", scaling.get("type")) or "default"),
            parameters={k: self.config[k] for k in outer if self.config.get(k)} | dict(scaling),
        )

    def heads(self) -> HeadShape:
        """Grouped-query attention of the whole model."""
        heads = self.size("num_attention_heads")
        kv_heads = self.size("num_key_value_heads", default=heads)
        return HeadShape(self.size("hidden_size"), heads, kv_heads)

    def window(self, number: int, *, default: Callable[[int], bool]) -> int:
        """Tokens that a query of that block sees, 0: all. layer_types of config.json says which
        blocks have the window; `default` does where it does not."""
        kinds, words = self._find(("layer_types",)), ("full_attention", "sliding_attention")
        if kinds is None:
            kind = words[default(number)]
        elif isinstance(kinds, list) and number < len(kinds):
            kind = kinds[number]
        else:
            raise self._wrong(("layer_types",), kinds, "a word for each layer")
        if kind not in words:
            raise UnsupportedModel(
                f"config.json of this {self.architecture} has layer_types {kind!r}, which is not "
                f"supported; possible: {', '.join(words)}"
            )
        return self.size("sliding_window") if kind == words[1] else 0

    def shapes(self, attention: AttentionSpec, moe: MoESpec | None = None) -> ModelShapes:
        """The record planning works with; attention is the same in every layer."""
        return ModelShapes(
            architecture=self.architecture,
            num_layers=self.size("num_hidden_layers"),
            vocab_size=self.size("vocab_size"),
            hidden_size=self.size("hidden_size"),
            max_position_embeddings=self.size("max_position_embeddings", default=2048),
            layers=(attention,) * self.size("num_hidden_layers"),
            moe=moe,
        )

    def experts(
        self, routing: RoutingSpec, dtype: str, *, width_key: str = "moe_intermediate_size"
    ) -> MoESpec:
        """The experts as one rank holds them."""
        width = self.divided(width_key, self.size(width_key))
        if routing.top_k > (most := routing.num_experts):
            raise self._wrong(("num_experts_per_tok",), routing.top_k, f"at most {most}")
        return MoESpec(routing, self.size("hidden_size"), width, dtype)

    def gqa(
        self, dtype: str, *, interleaved: bool = False, head_norms: bool = False
    ) -> AttentionSpec:
        """Grouped-query attention as one rank holds it."""
        shape, dim = self.heads(), self.head_dim()
        heads, kv_heads = shape.num_heads, shape.num_kv_heads
        if heads % kv_heads:
            raise self._wrong(
                ("num_key_value_heads",), kv_heads, f"a divisor of num_attention_heads {heads}"
            )
        if kv_heads > self.tp_size or self.tp_size % kv_heads:
            self.divided("num_key_value_heads", kv_heads)
        return AttentionSpec(
            kind="gqa",
            num_heads=self.divided("num_attention_heads", heads),
            num_kv_heads=max(1, kv_heads // self.tp_size),
            head_dim=dim,
            v_head_dim=dim,
            scale=dim**-0.5,
            dtype=dtype,
            rotary_interleaved=interleaved,
            head_norms=head_norms,
        )
