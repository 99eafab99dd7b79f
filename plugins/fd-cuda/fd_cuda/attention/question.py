"""Which attention and which recurrences these kernels serve. Imports no tensor library."""

from __future__ import annotations

from fastdeploy_core.contracts.attention import AttentionQuestion, StateQuestion
from fastdeploy_core.contracts.kv_formats import KV_FORMATS

from fd_cuda import probe

DTYPES = ("float32", "float16", "bfloat16")
MAX_HEAD_DIM = 256
MAX_LATENT = 512
# Query rows (tokens times heads of a group) of one program.
MAX_ROWS = 128
MAX_STATE_DIM = 256
# Earlier inputs that a program of the convolution reads fit into its own tokens.
MAX_CONV_WIDTH = 17
_FP8 = (8, 9)  # before, Triton has no such numbers


def why_not_triton(device: str, tensor_library: str, *dtypes: str) -> str:
    """Why Triton kernels cannot serve these; empty if they can."""
    if device != "cuda":
        return f"runs on cuda, not on {device}"
    if tensor_library != "torch":
        return f"needs torch, the device runs on {tensor_library}"
    reason = probe.why_not_triton()
    if reason:
        return reason
    unknown = [dtype for dtype in dtypes if dtype not in DTYPES]
    return f"dtype {unknown[0]}; possible: {', '.join(DTYPES)}" if unknown else ""


def why_not_state(question: StateQuestion) -> str:
    """Why not; empty if they do."""
    spec = question.spec
    reason = why_not_triton(question.device, question.tensor_library, spec.dtype, spec.state_dtype)
    if reason:
        return reason
    if spec.conv_width > MAX_CONV_WIDTH:
        return f"convolutions over {spec.conv_width} tokens; at most {MAX_CONV_WIDTH}"
    widest, most = max(spec.key_dim, spec.value_dim), MAX_STATE_DIM
    if (spec.kind, spec.dtype) == ("channel_delta", "float32"):
        most = MAX_STATE_DIM // 2  # of 256 a chunk takes more shared memory than a card has
    return f"states {widest} wide; at most {most}" if widest > most else ""


def why_not(question: AttentionQuestion) -> str:
    """Why not; empty if they do."""
    spec = question.spec
    reason = why_not_triton(question.device, question.tensor_library, spec.dtype)
    if reason:
        return reason
    quantized = question.kv_dtype in KV_FORMATS
    if not quantized and question.kv_dtype not in ("auto", spec.dtype):
        possible = ", ".join(("auto", spec.dtype, *KV_FORMATS))
        return f"cache dtype {question.kv_dtype!r}; possible: {possible}"
    if question.kv_dtype.startswith("float8") and (0, 0) < probe.capability() < _FP8:
        return "fp8 numbers need compute capability 8.9; possible: --kv-cache-dtype int8"
    if spec.kind == "mla":
        if quantized:
            return f"latent rows in {question.kv_dtype}; possible: auto"
        if spec.kv_lora_rank > MAX_LATENT:
            return f"latent rows of {spec.kv_lora_rank}; at most {MAX_LATENT}"
        index = spec.index
        if index is not None and (index.block != 1 or index.format or index.dim > MAX_HEAD_DIM):
            return (
                f"an indexer of {index.dim} numbers, blocks of {index.block}, keys in "
                f"{index.format or spec.dtype}; possible: single tokens, {spec.dtype}, at most "
                f"{MAX_HEAD_DIM} numbers"
            )
        return ""
    if spec.kind != "gqa":
        return f"kind {spec.kind!r}; possible: gqa, mla"
    if spec.num_heads // spec.num_kv_heads > MAX_ROWS:
        return f"{spec.num_heads // spec.num_kv_heads} query heads per kv head; at most {MAX_ROWS}"
    widest = max(spec.head_dim, spec.v_head_dim)
    return f"heads of {widest}; at most {MAX_HEAD_DIM}" if widest > MAX_HEAD_DIM else ""
