"""Operators that a vendor's own packages bring for PaddlePaddle: found by name when they are
installed, never copied."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from fastdeploy_core.contracts.base import Accept, Candidate, Decline
from fastdeploy_core.errors import PluginLoadError
from fastdeploy_core.tensor import loaded, namespace

if TYPE_CHECKING:
    from fastdeploy_core.contracts.attention import AttentionQuestion, AttentionSpec
    from fastdeploy_core.contracts.moe import MoEQuestion
    from fastdeploy_core.contracts.ops import KernelTable
    from fastdeploy_core.contracts.quant_formats import PackedWeight
    from fastdeploy_core.tensor import Tensor

SCORE = 150  # tuned for its device


class VendorOperators:
    """Looks for operators in these modules, in this order; imports them when first asked."""

    def __init__(self, *modules: str, aliases: Mapping[str, str] | None = None) -> None:
        self._names = modules
        self._aliases = aliases or {}  # an operator's other name
        self._modules: list[Any] | None = None

    def has(self, *names: str) -> bool:
        """Whether every one of them is installed."""
        return all(self._find(name) is not None for name in names)

    def missing(self, *names: str) -> str:
        """Those that are not installed, for a message; empty when all are."""
        return ", ".join(name for name in names if self._find(name) is None)

    def __getitem__(self, name: str) -> Callable[..., Any]:
        """The operator; PluginLoadError says where it was looked for."""
        found = self._find(name)
        if found is None:
            raise PluginLoadError(
                f"vendor operator {name!r} is not installed; looked in {', '.join(self._names)}; "
                "install the vendor's operator package"
            )
        return found

    def use(self, *modules: Any) -> None:
        """Look in these objects from now on, or again in the named modules; for tests."""
        self._modules = list(modules) or None

    def _find(self, name: str) -> Callable[..., Any] | None:
        if self._modules is None:
            if loaded() == ["torch"]:  # the vendor's torch is at work: these take no such tensors
                return None
            self._modules = [m for m in map(_import, self._names) if m is not None]
        for module in self._modules:
            for spelling in (name, self._aliases.get(name, name)):
                found: Callable[..., Any] | None = getattr(module, spelling, None)
                if found is not None:
                    return found
        return None


def answer_attention(
    question: AttentionQuestion,
    *,
    driver: str,
    device: str,
    operators: VendorOperators,
    needed: tuple[str, ...],
    dtypes: tuple[str, ...],
) -> Candidate:
    """The answer to fd_attention_backends of a driver made of these operators, for plain
    attention."""
    spec, reason = question.spec, ""
    if question.device != device:
        reason = f"runs on device {device!r} only"
    elif question.tensor_library == "torch":
        reason = "the vendor's operators take PaddlePaddle's tensors"
    elif spec.kind != "gqa" or spec.head_dim != spec.v_head_dim:
        reason = f"kind {spec.kind!r} with values of {spec.v_head_dim}; possible: gqa, equal widths"
    elif spec.dtype not in dtypes or question.kv_dtype not in ("auto", spec.dtype):
        reason = f"{spec.dtype} with cache {question.kv_dtype}; possible: {', '.join(dtypes)}"
    elif missing := operators.missing(*needed):
        reason = f"the vendor's operators are not installed: {missing}"
    return Candidate(driver, Decline(reason) if reason else Accept(SCORE, "the vendor's operators"))


def answer_moe(
    question: MoEQuestion,
    *,
    driver: str,
    device: str,
    operators: VendorOperators,
    needed: tuple[str, ...],
    dtypes: tuple[str, ...],
) -> Candidate:
    """The answer to fd_moe_backends of a driver made of these operators, for plain softmax
    routing."""
    routing, reason = question.spec.routing, ""
    if question.device != device:
        reason = f"runs on device {device!r} only"
    elif question.tensor_library == "torch":
        reason = "the vendor's operators take PaddlePaddle's tensors"
    elif routing.scoring != "softmax" or routing.num_groups > 1 or routing.scaling_factor != 1.0:
        reason = "possible: softmax scores without groups and scaling"
    elif not routing.renormalize:
        reason = "possible: weights that add up to 1"
    elif question.quantization or question.spec.dtype not in dtypes:
        reason = f"{question.quantization or question.spec.dtype}; possible: {', '.join(dtypes)}"
    elif missing := operators.missing(*needed):
        reason = f"the vendor's operators are not installed: {missing}"
    return Candidate(driver, Decline(reason) if reason else Accept(SCORE, "the vendor's operators"))


class WholeHeads:
    """For operators that rotate whole heads: where only the first dimensions of a head turn, the
    device's kernel turns them, and the operator gets a table that turns nothing."""

    def __init__(self, spec: AttentionSpec, kernels: KernelTable) -> None:
        self._spec, self._rotate = spec, kernels["rotary_embedding"]
        self._still: Tensor | None = None

    def __call__(
        self, q: Tensor, k: Tensor, positions: Tensor, rotary: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """q, k [num_tokens, heads, head_dim] and the table [max_positions, head_dim] float32."""
        width = self._spec.head_dim
        if rotary is None or rotary.shape[1] == width:
            return q, k, rotary
        q, k = self._rotate(q, k, positions, rotary, self._spec.rotary_interleaved)
        if self._still is None or self._still.shape[0] != rotary.shape[0]:
            sines = namespace(q).zeros(
                [rotary.shape[0], width // 2], dtype=rotary.dtype, device=rotary.device
            )
            self._still = namespace(q).cat((sines + 1, sines), 1)
        return q, k, self._still


class Int8Experts:
    """Cell `moe_experts_wint8` of vendors whose operators sort tokens by expert, multiply and add
    up: int8 weights [experts, outputs, inputs] with a scale per output. `ffn_arguments` orders what
    this vendor's product wants after (rows, rows of each expert): (weights, scales) to arguments.
    """

    ALGORITHM = "weight_only_int8"

    def __init__(
        self,
        operators: VendorOperators,
        ffn_arguments: Callable[[list[Tensor], list[Tensor]], tuple[Any, ...]],
    ) -> None:
        self._operators, self._ffn_arguments = operators, ffn_arguments

    def applies(self, facts: Mapping[str, Any]) -> bool:
        """The cell's predicate."""
        names = ("moe_expert_dispatch", "moe_expert_ffn", "moe_expert_reduce")
        return facts.get("dtype") in ("bfloat16", "float16") and self._operators.has(*names)

    def __call__(
        self,
        x: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        gate_up: PackedWeight,
        down: PackedWeight,
    ) -> Tensor:
        """As the reference. The operators choose experts themselves, so they are given scores that
        leave no choice."""
        xp, operators = namespace(x), self._operators
        shape = [x.shape[0], gate_up.num_experts]
        scores = xp.zeros(shape, dtype=xp.float32, device=x.device)
        scores = xp.scatter(scores, 1, topk_ids, topk_weights)
        rows, counts, places, weights, ids, _ = operators["moe_expert_dispatch"](
            *(x, scores, None, None, topk_ids.shape[1], False, self.ALGORITHM),
            topk_only_mode=True,
        )
        matrices = [w.tensors["weight"] for w in (gate_up, down)]
        scales = [w.tensors["scale"].squeeze(-1).to(x.dtype) for w in (gate_up, down)]
        rows = operators["moe_expert_ffn"](rows, counts, *self._ffn_arguments(matrices, scales))
        y: Tensor = operators["moe_expert_reduce"](
            *(rows, weights, places, ids, None), norm_topk_prob=False, routed_scaling_factor=1.0
        )
        return y


def _import(name: str) -> Any:
    """The module; None when it is not installed or cannot be loaded here."""
    try:
        return importlib.import_module(name)
    except (ImportError, OSError):
        return None
