"""Rotary position embedding tables: frequencies of every scaling rule, as one [P, R] array.

The rotation itself is the kernel `rotary_embedding`. Frequencies are float32, as in the training of
the models. Rules: linear (position interpolation), llama3 (the Llama 3.1 release), yarn (arXiv
2309.00071), longrope (arXiv 2402.13753, within the trained length), factors (such a rule as one
number per frequency).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from fastdeploy_core.errors import ConfigError, UnsupportedModel


@dataclass(frozen=True, slots=True)
class RotarySpec:
    """What is rotated, and how fast. `dim`: so many dimensions, the first of each head."""

    dim: int
    theta: float
    interleaved: bool = False  # pairs (0,1), (2,3)...; else (0,R/2), (1,R/2+1)...
    max_position_embeddings: int = 0  # of config.json; the default of scaling rules
    kind: str = "default"
    parameters: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        """UnsupportedModel unless the rule is known."""
        if self.kind not in _RULES:
            raise UnsupportedModel(
                f"rope scaling {self.kind!r} of config.json is not supported; possible: "
                f"{', '.join(sorted(_RULES))}"
            )

    def number(self, name: str, default: float | None = None) -> float:
        """A parameter of the scaling rule."""
        value = self.parameters.get(name)
        if value is None:
            value = default
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ConfigError(
                f"rope scaling {self.kind!r} of config.json has {name}={value!r}; expected a number"
            )
        return float(value)


def cos_sin_table(spec: RotarySpec, num_positions: int) -> np.ndarray:
    """[num_positions, dim] float32: dim / 2 cosines, then dim / 2 sines."""
    if spec.kind in ("longrope", "su"):
        trained = int(spec.number("original_max_position_embeddings"))
        if num_positions > trained:
            raise UnsupportedModel(
                f"rope scaling {spec.kind!r} of config.json turns all tokens of a sequence by "
                f"other factors once there are more than {trained}, which a cache of rotated keys "
                f"cannot follow; possible: contexts of up to {trained} tokens; "
                f"run with --max-model-len {trained}"
            )
    frequencies, magnitude = _RULES[spec.kind](spec)
    positions = np.arange(num_positions, dtype=np.float32)
    angles = np.outer(positions, frequencies.astype(np.float32))
    table = np.concatenate((np.cos(angles), np.sin(angles)), axis=1)
    return table * np.float32(magnitude)


def _plain(spec: RotarySpec) -> np.ndarray:
    exponents = np.arange(0, spec.dim, 2, dtype=np.float32) / np.float32(spec.dim)
    powers: np.ndarray = np.power(np.float32(spec.theta), exponents)
    return (1.0 / powers).astype(np.float32)


def _default(spec: RotarySpec) -> tuple[np.ndarray, float]:
    return _plain(spec), 1.0


def _linear(spec: RotarySpec) -> tuple[np.ndarray, float]:
    return _plain(spec) / np.float32(spec.number("factor")), 1.0


def _llama3(spec: RotarySpec) -> tuple[np.ndarray, float]:
    """Long wavelengths are stretched by `factor`, short ones kept, those in between blended."""
    factor = spec.number("factor")
    low, high = spec.number("low_freq_factor"), spec.number("high_freq_factor")
    original = spec.number("original_max_position_embeddings", spec.max_position_embeddings)
    plain = _plain(spec)
    wavelength = 2 * math.pi / plain
    blend = np.clip((original / wavelength - low) / (high - low), 0.0, 1.0)
    return ((1 - blend) * plain / factor + blend * plain).astype(np.float32), 1.0


def _factors(spec: RotarySpec) -> tuple[np.ndarray, float]:
    """Each frequency is divided by its own number, for files that store the result of a rule."""
    factors = np.asarray(spec.parameters.get("factors"), np.float32)
    if factors.shape != (spec.dim // 2,):
        raise ConfigError(f"rope scaling 'factors' has no list of {spec.dim // 2} numbers")
    return _plain(spec) / factors, 1.0


def _longrope(spec: RotarySpec) -> tuple[np.ndarray, float]:
    """Within the trained length: `short_factor`, and a magnitude for the extended one."""
    original = spec.number("original_max_position_embeddings")
    factor = spec.number("factor", spec.max_position_embeddings / original)
    factors = np.asarray(spec.parameters.get("short_factor"), np.float32)
    if factors.shape != (spec.dim // 2,):
        raise ConfigError(
            f"rope scaling {spec.kind!r} of config.json has no short_factor list of "
            f"{spec.dim // 2} numbers"
        )
    stretch = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return _plain(spec) / factors, spec.number("attention_factor", stretch)


def yarn_magnitude(factor: float, mscale: float = 1.0) -> float:
    """By what YaRN multiplies cosines and sines when it stretches the context `factor` times."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _yarn(spec: RotarySpec) -> tuple[np.ndarray, float]:
    """Dimensions that turn often within the trained context are kept, slow ones interpolated."""
    original = spec.number("original_max_position_embeddings", spec.max_position_embeddings)
    factor = spec.number("factor", spec.max_position_embeddings / original)

    def dimension(rotations: float) -> float:
        """The dimension that makes this many turns within the trained context."""
        turns = math.log(original / (rotations * 2 * math.pi))
        return spec.dim * turns / (2 * math.log(spec.theta))

    low = dimension(spec.number("beta_fast", 32) or 32)
    high = dimension(spec.number("beta_slow", 1) or 1)
    if spec.parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.dim - 1)
    if low == high:
        high += 0.001  # the ramp below divides by the difference
    ramp = np.clip((np.arange(spec.dim // 2, dtype=np.float32) - low) / (high - low), 0, 1)
    plain = _plain(spec)
    frequencies = (plain / factor * ramp + plain * (1 - ramp)).astype(np.float32)
    return frequencies, _yarn_attention_factor(spec, factor)


def _yarn_attention_factor(spec: RotarySpec, factor: float) -> float:
    if spec.parameters.get("attention_factor") is not None:
        return spec.number("attention_factor")
    mscale, all_dim = spec.parameters.get("mscale"), spec.parameters.get("mscale_all_dim")
    if mscale and all_dim:
        return yarn_magnitude(factor, mscale) / yarn_magnitude(factor, all_dim)
    return yarn_magnitude(factor)


_RULES: Final[dict[str, Callable[[RotarySpec], tuple[np.ndarray, float]]]] = {
    "default": _default,
    "dynamic": _default,  # up to max_position_embeddings; no longer context is served
    "factors": _factors,
    "linear": _linear,
    "llama3": _llama3,
    "longrope": _longrope,
    "none": lambda spec: (np.zeros(spec.dim // 2, np.float32), 1.0),  # nothing turns
    "su": _longrope,  # its name in older checkpoints
    "yarn": _yarn,
}
