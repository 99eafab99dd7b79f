"""The vendor's fused operators, and the cells of the kernel table that are made of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fd_accelerator import vendor_operators
from fd_accelerator.vendor_operators import VendorOperators

from fastdeploy_core.tensor import namespace

if TYPE_CHECKING:
    from fastdeploy_core.contracts import Candidate
    from fastdeploy_core.contracts.attention import AttentionQuestion
    from fastdeploy_core.contracts.quant_formats import PackedWeight
    from fastdeploy_core.tensor import Tensor

OPERATORS = VendorOperators(
    "paddle_custom_device.gcu.ops",
    "fastdeploy_ops",
    aliases={
        "fused_rotary_embedding": "fused_rotary_embedding_gcu",
        "flash_attn_var_len": "flash_attn_var_len_gcu",
        "rms_norm": "rms_norm_gcu",
        "fused_add_rms_norm": "fused_add_rms_norm_op",
    },
)
ATTENTION = ("fused_rotary_embedding", "reshape_and_cache_flash", "flash_attn_var_len")
MOE = ("moe_align_block_size", "invoke_fused_moe_kernel")
# Tile sizes of the grouped product, as FastDeploy 2.x passed them.
TILES = {"BLOCK_SIZE_M": 32, "BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": 128, "GROUP_SIZE_M": 1}


def answer_attention(question: AttentionQuestion) -> Candidate:
    """Whether driver `gcu_flash` can serve the layer."""
    return vendor_operators.answer_attention(
        question,
        driver="gcu_flash",
        device="gcu",
        operators=OPERATORS,
        needed=ATTENTION,
        dtypes=("bfloat16", "float16"),
    )


def has_norms(facts: Mapping[str, Any]) -> bool:
    """For both norms."""
    return OPERATORS.has("rms_norm", "fused_add_rms_norm")


def has_moe(facts: Mapping[str, Any]) -> bool:
    """For the grouped product; it takes no float32."""
    return facts.get("dtype") in ("bfloat16", "float16") and OPERATORS.has(*MOE)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., H]."""
    return OPERATORS["rms_norm"](x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(normed, x + residual), both [T, H]."""
    normed, total = OPERATORS["fused_add_rms_norm"](x, residual, weight, eps)
    return normed, total


def moe_experts(
    x: Tensor, topk_ids: Tensor, topk_weights: Tensor, gate_up: Tensor, down: Tensor
) -> Tensor:
    """Two grouped products over tokens sorted by expert; weights are applied by the second."""
    xp = namespace(x)
    tokens, top_k = topk_ids.shape
    if tokens == 0:
        return xp.zeros_like(x)
    experts, block = gate_up.shape[0], TILES["BLOCK_SIZE_M"]
    ids = topk_ids.to(xp.int32)
    padded = tokens * top_k + experts * (block - 1)

    def ints(size: int) -> Tensor:
        return xp.zeros([size], dtype=xp.int32, device=x.device)

    places = OPERATORS["moe_align_block_size"](
        ints(padded), ints(padded // block), ints(1), ids, experts, block
    )

    def product(source: Tensor, weight: Tensor, applies_weights: bool, ranks: int) -> Tensor:
        out = xp.empty([tokens, top_k, weight.shape[1]], dtype=x.dtype, device=x.device)
        OPERATORS["invoke_fused_moe_kernel"](
            *(source, weight, out, None, None, None, topk_weights, ids, *places),
            *(applies_weights, ranks, TILES, False, [0, -1]),
        )
        return out

    hidden = xp.silu_and_mul(product(x, gate_up, False, top_k))
    return product(hidden.reshape([tokens * top_k, -1]), down, True, 1).sum(dim=1)


def has_linear_quant(facts: Mapping[str, Any]) -> bool:
    """For the product with int8 weights; it takes no float32."""
    return facts.get("dtype") in ("bfloat16", "float16") and OPERATORS.has("linear_quant")


def linear_wint8(x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
    """int8 weights [outputs, inputs] with a scale per output, or for groups of inputs."""
    scale = weight.tensors["scale"].to(x.dtype)
    grouped = scale.shape[-1] > 1
    y: Tensor = OPERATORS["linear_quant"](
        lhs=x,
        rhs=weight.tensors["weight"],
        scale=scale if grouped else scale.squeeze(-1),
        bias=None,
        group_size=weight.group_size if grouped else -1,
    )
    return y if bias is None else y + bias
