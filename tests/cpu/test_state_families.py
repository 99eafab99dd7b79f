"""Families whose layers keep states, against transformers, on checkpoints that transformers saved,
in float32; on one rank and on two, and through the engine."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import numpy as np
import pytest
from fd_models.recurrent.states import PlainStates

from fastdeploy_core.config import BatchConfig, CacheConfig
from fastdeploy_core.contracts.attention import StateSpec, cache_dtypes
from fastdeploy_core.contracts.device import DeviceOptions
from fastdeploy_core.errors import ResourceError
from fastdeploy_core.kvcache.sizing import plan_cache
from fastdeploy_core.models.shapes import read_shapes
from fastdeploy_core.plugins.kernels import build_kernel_table
from fastdeploy_core.reference.attention import ReferenceAttention
from fastdeploy_core.reference.device import CpuDevice
from fastdeploy_core.tensor import DTYPE_BYTES
from fastdeploy_core.types.worker import LayerGroup, WorkerInfo
from tests.checkpoints import NUM_GREEDY, STATE_VARIANTS, build, reference
from tests.cpu.test_families_engine import check_engine
from tests.paged import PagedModel
from tests.parity import check_chunks_beside_a_decode, check_prompts_and_greedy, relative_error
from tests.tp_rank import run_ranks


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("states"), list(STATE_VARIANTS))


SLOW = (
    "qwen3-5",
    "qwen3-5-moe",
    "granite4-dense",
    "lfm2-moe",
)  # made of parts that the others have, too
MARKED = [pytest.param(v, marks=[pytest.mark.slow] if v in SLOW else []) for v in STATE_VARIANTS]


@pytest.fixture(params=STATE_VARIANTS)
def variant(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_prompt_logits_and_64_greedy_tokens_equal_transformers(
    checkpoints: Path, variant: str, tensor_library: str
) -> None:
    model = PagedModel(checkpoints / variant, tensor_library)
    largest = check_prompts_and_greedy(model, reference(checkpoints / variant))
    print(f"{variant} on {tensor_library}: largest relative logit error {largest:.1e}")


def test_a_prompt_in_chunks_beside_a_decode_gives_the_same_logits(
    checkpoints: Path, variant: str, tensor_library: str
) -> None:
    model = PagedModel(checkpoints / variant, tensor_library)
    check_chunks_beside_a_decode(model, reference(checkpoints / variant))


def test_what_transformers_decoded_gives_the_same_as_a_prompt(
    checkpoints: Path, variant: str, tensor_library: str
) -> None:
    """A prompt longer than several chunks of the recurrence, whole and in uneven parts."""
    model = PagedModel(checkpoints / variant, tensor_library)
    answer = reference(checkpoints / variant)[1]
    greedy = answer["greedy"].tolist()
    text = answer["prompt"].tolist() + greedy[:-1]
    (whole,) = model.step([("whole", text)])
    assert whole[-len(greedy) :].argmax(-1).tolist() == greedy
    assert relative_error(whole[: len(answer["logits"])], answer["logits"]) < 1e-4
    parts = [
        model.step([("parts", text[a:b])])[0] for a, b in ((0, 3), (3, 4), (4, 45), (45, None))
    ]
    assert relative_error(np.concatenate(parts), whole) < 1e-4


@pytest.mark.parametrize("variant", MARKED)
def test_the_engine_gives_the_tokens_of_transformers(
    checkpoints: Path, variant: str, tensor_library: str
) -> None:
    check_engine(checkpoints / variant, tensor_library)


# Rows in groups by key head; rows in plain order; convolutions alone; a gate for each channel.
ON_TWO_RANKS = (
    "qwen3-next",
    *(pytest.param(v, marks=pytest.mark.slow) for v in ("qwen3-5", "lfm2", "kimi-linear")),
)


@pytest.mark.parametrize("divided", ON_TWO_RANKS)
def test_two_ranks_equal_one(
    checkpoints: Path, divided: str, tensor_library: str, tmp_path: Path
) -> None:
    answers = reference(checkpoints / divided)
    prompts = {str(i): answer["prompt"].tolist() for i, answer in enumerate(answers)}
    for rank in run_ranks(
        checkpoints / divided, tensor_library, 2, tmp_path / "group", prompts, NUM_GREEDY
    ):
        assert relative_error(np.array(rank["logits"]), answers[0]["logits"][-1]) < 1e-4
        assert [rank["tokens"][n] for n in prompts] == [a["greedy"].tolist() for a in answers]


# Qwen3-Next-80B-A3B, as its config.json says.
REAL = {
    "architectures": ["Qwen3NextForCausalLM"],
    "decoder_sparse_step": 1,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000000,
    "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
    "vocab_size": 151936,
}
KV_BYTES = (
    12 * 2 * 2 * 256 * 2
)  # a token's keys and values in 12 layers of 2 heads of 256, bfloat16
# 36 layers: a float32 matrix of 128 x 128 for 32 heads, and 3 inputs of the convolution.
STATE_BYTES = 36 * (32 * 128 * 128 * 4 + 3 * (2 * 2048 + 4096) * 2)


@pytest.mark.parametrize("length", [8192, 32768, 131072])
@pytest.mark.parametrize("num_seqs", [1, 32])
def test_qwen3_next_takes_the_bytes_of_the_arithmetic(
    length: int, num_seqs: int, tensor_library: str
) -> None:
    """Keys and values for as many tokens as there are, states for as many sequences."""
    device = CpuDevice(DeviceOptions(tensor_library=tensor_library, num_threads=1))
    kernels, found = build_kernel_table("cpu"), dict.fromkeys(("all", "state"), 0)
    for spec in read_shapes(REAL, dtype="bfloat16").layers:
        make = PlainStates if isinstance(spec, StateSpec) else ReferenceAttention
        shapes = make(spec, 64, device, kernels).cache_shapes(1)
        for shape, dtype in zip(shapes, cache_dtypes(spec, len(shapes)), strict=True):
            found[spec.retention.kind] += math.prod(shape) * DTYPE_BYTES[dtype]
    device.close()
    assert found == {"all": 64 * KV_BYTES, "state": STATE_BYTES}
    assert STATE_BYTES / KV_BYTES == 3144
    info = WorkerInfo(
        num_layers=48,
        vocab_size=1000,
        max_model_len=length,
        bytes_per_block=found["all"],
        available_bytes=(2 * num_seqs + 2) * STATE_BYTES + num_seqs * length * KV_BYTES,
        block_size=64,
        bounded=[LayerGroup("state", 0, found["state"])],
    )
    batch = BatchConfig(max_num_seqs=num_seqs, max_num_batched_tokens=8192)
    plan = plan_cache([info], CacheConfig(), batch, length)
    (states,) = plan.bounded
    kept = plan.num_blocks * found["all"] + states.num_blocks * STATE_BYTES
    assert states.num_blocks >= 2 * num_seqs + 2 and plan.num_blocks * 64 >= length
    assert 0 <= info.available_bytes - kept < STATE_BYTES  # nothing is lost by padding
    assert f"layers with a state ({STATE_BYTES} bytes each)" in plan.report[1]
    too_little = msgspec.structs.replace(
        info, available_bytes=(2 * num_seqs + 2) * STATE_BYTES + length * KV_BYTES - 1
    )
    taken = (2 * num_seqs + 2) * STATE_BYTES
    with pytest.raises(ResourceError, match=f"a state take {taken} for all .*--max-num-seqs"):
        plan_cache([too_little], CacheConfig(), batch, length)
