"""Which fields of config.json a family may leave unread.

A field that nobody here knows and whose name sounds like a part of the computation ends the start:
the answers would be those of another model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Final

from fastdeploy_core.errors import ConfigError, UnsupportedModel
from fastdeploy_core.models.decoder import GroupedQueryLM
from fastdeploy_core.models.reading import ConfigReader

if TYPE_CHECKING:
    from fastdeploy_core.contracts.attention import AttentionSpec
    from fastdeploy_core.contracts.model import ModelShapes
    from fastdeploy_core.layers import ModelBuilder, RotarySpec

_READ: Final = {
    "attention_bias",
    "head_dim",
    "hidden_act",
    "layer_types",
    "num_attention_heads",
    "num_experts_per_tok",
    "num_local_experts",
    "original_max_position_embeddings",
    "rms_norm_eps",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "sliding_window",
}
# Of training, of reports, or of how transformers computes the same numbers.
_WITHOUT_EFFECT: Final = {
    "attention_dropout",
    "attn_implementation",
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_experts_implementation",
    "embd_pdrop",
    "expert_dropout",
    "initializer_range",
    "keys_to_ignore_at_inference",
    "output_attentions",
    "output_router_logits",
    "pretraining_tp",
    "quantization_config",
    "resid_pdrop",
    "router_aux_loss_coef",
    "router_jitter_noise",
    "router_z_loss_coef",
}
# Parts of a field's name that speak of the computation.
_WORDS: Final = (
    *("act", "alibi", "attention", "attn", "bias", "cap", "chunk", "clip", "emb_", "expert"),
    *("head", "multiplier", "mup", "norm", "parallel", "position", "qk_", "residual", "rope"),
    *("rotary", "router", "routing", "scal", "scor", "shared", "sink", "sparse", "window"),
)
_NAMES_OF_SIZES: Final = {"max_position_embeddings", "num_key_value_heads"}
_ROPE: Final = {
    "default": frozenset[str](),
    "linear": frozenset({"factor"}),
    "dynamic": frozenset({"factor"}),
    "llama3": frozenset(
        {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
    ),
    "yarn": frozenset(
        {
            *("factor", "original_max_position_embeddings", "attention_factor", "beta_fast"),
            *("beta_slow", "mscale", "mscale_all_dim", "truncate"),
        }
    ),
    "longrope": frozenset(
        {
            *("factor", "original_max_position_embeddings", "attention_factor"),
            *("short_factor", "long_factor"),
        }
    ),
}
LOCAL_BASE: Final = "rope_local_base_freq"  # of blocks with a window
_ROPE_NAMES: Final = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})


class StrictLM(GroupedQueryLM):
    """A family that reads, or refuses, every field of config.json that could change its answers.

    `reads` are its own fields; `only` are fields that must have one of the values given, or none;
    `defaults` are what transformers takes where config.json does not say, but for null.
    """

    reads: ClassVar[frozenset[str]] = frozenset()
    only: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    defaults: ClassVar[Mapping[str, Any]] = {}
    other_layers: ClassVar[frozenset[str]] = frozenset()  # words of layer_types beside attention's
    uses_window: ClassVar[bool] = True  # what a config.json without use_sliding_window means
    # Without layer_types: of so many blocks the last has no window; 0: every block has one.
    sliding_window_pattern: ClassVar[int] = 0

    @classmethod
    def check(cls, read: ConfigReader) -> None:
        """UnsupportedModel names the first field that this family does not compute."""
        known = _READ | _WITHOUT_EFFECT | _NAMES_OF_SIZES | cls.reads
        for key, value in read.config.items():
            if key in cls.only:
                if value is not None and value not in cls.only[key]:
                    raise _refused(read, key, value, f"{key} {_or(cls.only[key])}")
            elif key not in known and not _is_neutral(value) and any(w in key for w in _WORDS):
                raise _refused(read, key, value, f"no {key}, or null")
        kinds = read.config.get("layer_types") or []
        allowed = {"full_attention", *cls.other_layers}
        allowed |= {"sliding_attention"} if cls._window(read) else set()
        other = sorted({str(kind) for kind in kinds} - allowed)
        if other:
            raise _refused(read, "layer_types", other, " or ".join(sorted(allowed)))
        _check_rope(read, cls.partial_rotary is not None)

    @classmethod
    def shapes(cls, config: Mapping[str, Any], tp_size: int, dtype: str) -> ModelShapes:
        """Shapes of one rank."""
        return super().shapes({**cls.defaults, **config}, tp_size, dtype)

    def __init__(self, config: Mapping[str, Any], build: ModelBuilder) -> None:
        super().__init__({**self.defaults, **config}, build)

    @classmethod
    def has_window(cls, read: ConfigReader, number: int) -> bool:
        """Whether a block sees the window alone, where config.json has no layer_types."""
        if not (pattern := cls.sliding_window_pattern):
            return True
        return (number + 1) % read.size("sliding_window_pattern", default=pattern) != 0

    @classmethod
    def layer(
        cls, read: ConfigReader, number: int, spec: AttentionSpec, rotary: RotarySpec
    ) -> tuple[AttentionSpec, RotarySpec]:
        """With the block's window."""
        if not cls._window(read):
            return spec, rotary
        size = read.window(number, default=lambda number: cls.has_window(read, number))
        return replace(spec, window=size), rotary

    @classmethod
    def _window(cls, read: ConfigReader) -> int:
        """Tokens that a query of windowed blocks sees; 0: there are none. Some configs name a
        window that is not in use."""
        if not read.flag("use_sliding_window", default=cls.uses_window):
            return 0
        return read.count("sliding_window", default=0)


class LocalRopeLM(StrictLM):
    """A family whose blocks with a window turn by a base of their own, without scaling."""

    local_theta: ClassVar[float | None] = None  # None: the base of the other blocks

    @classmethod
    def layer(
        cls, read: ConfigReader, number: int, spec: AttentionSpec, rotary: RotarySpec
    ) -> tuple[AttentionSpec, RotarySpec]:
        """With the block's window and its rule."""
        spec, rotary = super().layer(read, number, spec, rotary)
        if not spec.window:
            return spec, rotary
        theta = read.number(LOCAL_BASE, default=cls.local_theta or rotary.theta)
        return spec, replace(rotary, theta=theta, kind="default", parameters={})

    @classmethod
    def shapes(cls, config: Mapping[str, Any], tp_size: int, dtype: str) -> ModelShapes:
        """Shapes of one rank."""
        return super().shapes(_with_one_rope(config), tp_size, dtype)

    def __init__(self, config: Mapping[str, Any], build: ModelBuilder) -> None:
        super().__init__(_with_one_rope(config), build)


def _with_one_rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """config.json as older releases of transformers wrote it: a rule for blocks without a window,
    and a base for the others."""
    rope = config.get("rope_parameters")
    if not isinstance(rope, Mapping) or not isinstance(rope.get("full_attention"), Mapping):
        return config
    local = rope.get("sliding_attention") or {}
    if local.get("rope_type", "default") != "default":
        raise UnsupportedModel(
            f"config.json of this {ConfigReader(config).architecture} has rope scaling "
            f"{local['rope_type']!r} for blocks with a window, which is not supported; possible: "
            "default"
        )
    return {
        **config,
        "rope_parameters": rope["full_attention"],
        LOCAL_BASE: local.get("rope_theta"),
    }


def has_positions(read: ConfigReader, number: int) -> bool:
    """Whether heads of a block turn, in families in which every so-many-th block's do not."""
    turning = read.config.get("no_rope_layers")
    every = read.size("no_rope_layer_interval", default=4)
    return bool(turning[number] if turning else (number + 1) % every)


def _check_rope(read: ConfigReader, is_partial: bool) -> None:
    rope = read.config.get("rope_parameters") or read.config.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise ConfigError(
            f"config.json of this {read.architecture} has rope_scaling={rope!r}; expected an object"
        )
    kind = str(rope.get("rope_type", rope.get("type")) or "default")
    kind = "longrope" if kind == "su" else kind
    known = _ROPE_NAMES | _ROPE.get(kind, frozenset(rope))  # other kinds are refused by their name
    for key, value in rope.items():
        if key not in known and value is not None:
            raise _refused(read, f"rope_parameters.{key}", value, f"no {key} with {kind!r}")
    share = rope.get("partial_rotary_factor")
    if not is_partial and share not in (None, 1):
        raise _refused(read, "rope_parameters.partial_rotary_factor", share, "1")


def _is_neutral(value: Any) -> bool:
    """Whether a field of an unknown part says that the part is absent, or does nothing."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return (
        value is None or value is False or value in ("", [], {}) or (is_number and value in (0, 1))
    )


def _or(values: tuple[Any, ...]) -> str:
    return " or ".join(map(repr, values))


def _refused(read: ConfigReader, key: str, value: Any, possible: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"config.json of this {read.architecture} has {key}={value!r}, which changes the answers "
        f"and is not supported; possible: {possible}"
    )
