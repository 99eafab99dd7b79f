"""Every operation of the table against the conformance kit's oracle: on the GPU where there is one,
in Triton's interpreter elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fastdeploy_testing.conformance.test_moe import MoEConformance
from fastdeploy_testing.conformance.test_ops import OpsConformance
from fastdeploy_testing.drivers import build_kernel_table

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
# The interpreter computes bfloat16 in a way of its own, so float16 stands for both; float32 takes
# as long again.
DTYPES = (
    ["float32", "float16", "bfloat16"]
    if HAS_GPU
    else ["float16", pytest.param("float32", marks=pytest.mark.slow)]
)


class OnCuda:
    """The cuda table, on a device that can hold its tensors."""

    runs_on = DEVICE
    kind = "none"  # the device is `runs_on`, with every command line

    @pytest.fixture(scope="class")
    @classmethod
    def fd_tensor(cls) -> str:
        return "torch"

    @pytest.fixture(scope="class")
    @classmethod
    def kernels(cls, device: Any) -> Any:
        return build_kernel_table("cuda", {"tensor_library": "torch"})

    @pytest.fixture(params=DTYPES)
    def dtype(self, request: pytest.FixtureRequest) -> str:
        return str(request.param)


class TestKernels(OnCuda, OpsConformance):
    """All operations."""

    if not HAS_GPU:
        rows_of_limits = 32

        def test_draws_follow_the_distribution(self, device: Any, kernels: Any) -> None:
            pytest.skip("20,000 programs take minutes to interpret; draws equal the reference's")

    def test_nothing_is_left_to_the_reference(self, kernels: Any) -> None:
        from fastdeploy_core.contracts.ops import OPERATIONS

        origins = kernels.origins()
        # Composed of others: logits that are not rounded of "linear", or of what the library has,
        # and draws. "keep_results" is for devices that decode several times in one go.
        # "select_rows" is one kernel of the library.
        others = {"linear_logits", "draw", "keep_results", "select_rows"}
        assert {o for o in OPERATIONS if origins[o] != "fd-cuda"} == others


class TestMoE(OnCuda, MoEConformance):
    """The driver."""

    if not HAS_GPU:

        @pytest.fixture(params=["float32"])
        def dtype(self, request: pytest.FixtureRequest) -> str:
            return str(request.param)  # TestKernels has the others; interpreting takes its time

    def _backend(
        self, request: pytest.FixtureRequest, device: Any, kernels: Any, dtype: str, routing: Any
    ) -> Any:
        from fastdeploy_core.contracts.moe import MoESpec

        from fastdeploy_testing.conformance.test_moe import HIDDEN, INTERMEDIATE
        from fd_cuda.moe import CudaMoE

        return CudaMoE(MoESpec(routing, HIDDEN, INTERMEDIATE, dtype), device, kernels)


class TestBatchInvariance:
    """FD_BATCH_INVARIANT=1: a row's bits do not depend on what stands beside it."""

    ROWS = (1, 2, 9, 40)

    @pytest.fixture(autouse=True)
    def invariant(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("FD_BATCH_INVARIANT", "1")

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
    def test_products(self, dtype: torch.dtype) -> None:
        from fd_cuda.kernels import linear, matmul

        torch.manual_seed(0)
        x = torch.randn(max(self.ROWS), 96, device=DEVICE).to(dtype)
        weight = torch.randn(48, 96, device=DEVICE).to(dtype)
        norm, wide = torch.randn(96, device=DEVICE).to(dtype), torch.randn(12, 96, device=DEVICE)
        residual = torch.randn(max(self.ROWS), 48, device=DEVICE).to(dtype)
        for name, run in {
            "linear": lambda n: linear.linear(x[:n], weight, None),
            "norm_linear": lambda n: linear.norm_linear(x[:n], norm, 1e-5, weight, None),
            "gated_linear": lambda n: linear.gated_linear(x[:n], norm, 1e-5, weight, None),
            "linear_add": lambda n: linear.linear_add(x[:n], weight, None, residual[:n].clone()),
            "linear_float32": lambda n: matmul.linear_float32(x[:n], wide),
            "greedy_linear": lambda n: linear.greedy_linear(x[:n], weight, None)[1],
        }.items():
            crowd = run(max(self.ROWS))
            for rows in self.ROWS:
                assert torch.equal(run(rows), crowd[:rows]), f"{name} with {rows} rows"

    def test_norms_of_many_rows(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from fd_cuda.kernels import norm

        monkeypatch.setattr(norm, "_MANY", 8)
        torch.manual_seed(0)
        x = torch.randn(9, 1000, device=DEVICE).half()
        weight = torch.randn(1000, device=DEVICE).half()
        crowd = norm.rms_norm(x, weight, 1e-5)
        for row in (0, 1, 8):
            assert torch.equal(norm.rms_norm(x[row : row + 1], weight, 1e-5)[0], crowd[row])

    def test_experts(self) -> None:
        from fd_cuda.kernels import experts

        torch.manual_seed(0)
        x = torch.randn(max(self.ROWS), 32, device=DEVICE).half()
        gate_up = torch.randn(8, 48, 32, device=DEVICE).half()
        down = torch.randn(8, 32, 24, device=DEVICE).half()
        ids = torch.argsort(torch.rand(max(self.ROWS), 8, device=DEVICE), -1)[:, :3]
        weights = torch.rand(max(self.ROWS), 3, device=DEVICE)
        crowd = experts.moe_experts(x, ids, weights, gate_up, down)
        for rows in self.ROWS:
            alone = experts.moe_experts(x[:rows], ids[:rows], weights[:rows], gate_up, down)
            assert torch.equal(alone, crowd[:rows]), f"{rows} rows"


def test_norms_of_rows_that_share_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    from fd_cuda.kernels import norm

    monkeypatch.setattr(norm, "_MANY", 8)
    torch.manual_seed(0)
    x = torch.randn(11, 1000, device=DEVICE).half()
    weight = torch.randn(1000, device=DEVICE).half()
    wanted = torch.nn.functional.rms_norm(x.double(), (1000,), weight.double(), 1e-5)
    found = norm.rms_norm(x, weight, 1e-5).double()
    assert ((found - wanted).norm(dim=1) < 1e-3 * wanted.norm(dim=1)).all()


@pytest.mark.parametrize(("rows", "experts"), [(33, 100), (130, 384), (70, 512), (520, 8)])
def test_scores_of_many_rows_come_in_parts(rows: int, experts: int) -> None:
    """By small tiles, and by large ones where these are many or the rows are."""
    from fd_cuda.kernels import matmul

    torch.manual_seed(rows)
    x = torch.randn(rows, 88, device=DEVICE).to(torch.bfloat16 if HAS_GPU else torch.float32)
    weight = torch.randn(experts, 88, device=DEVICE)
    wanted = x.double() @ weight.double().T
    assert matmul.scores_in_parts(x, weight).shape[0] > 1
    assert (matmul.linear_float32(x, weight).double() - wanted).norm() < 1e-5 * wanted.norm()


@pytest.mark.parametrize(("rows", "experts"), [(2050, 100), (300, 700), (1030, 60)])
def test_scores_of_many_bfloat16_rows_keep_the_digits_of_float32(rows: int, experts: int) -> None:
    """As sums of three bfloat16 numbers, from weights of any size."""
    from fd_cuda.kernels import matmul

    torch.manual_seed(rows)
    x = torch.randn(rows, 88, device=DEVICE).to(torch.bfloat16)
    weight = torch.randn(experts, 88, device=DEVICE) * 10.0 ** torch.randint(
        -20, 20, (experts, 1), device=DEVICE
    )
    wanted = x.double() @ weight.double().T
    found = matmul.linear_float32(x, weight).double()
    # Matrix units lose digits of large sums.
    tolerance = 1e-5 if HAS_GPU else 1e-6
    assert ((found - wanted).norm(dim=0) < tolerance * wanted.norm(dim=0)).all()


def test_draws_equal_the_references() -> None:
    from fastdeploy_core.reference.ops import sampling as ops_sampling

    from fd_cuda.kernels import sampling

    torch.manual_seed(0)
    for rows, width in ((1, 50), (3, 5000)):
        logits = torch.randn(rows, width) * 3
        logits[:, : width // 3] = float("-inf")
        seeds, places = torch.randint(-(2**62), 2**62, (rows,)), torch.randint(0, 99999, (rows,))
        sampled = sampling.sample(logits.to(DEVICE), seeds.to(DEVICE), places.to(DEVICE))
        assert torch.equal(sampled.cpu(), ops_sampling.sample(logits, seeds, places))


@pytest.mark.parametrize("width", [7, 600, 5000])
def test_kept_logits_equal_the_references(width: int) -> None:
    from fastdeploy_core.reference.ops import sampling as ops_sampling

    from fd_cuda.kernels import filtering

    torch.manual_seed(0)
    for trial, spread in enumerate((1.0, 3.0, 0.1, 8.0)):
        x = torch.randn(6, width) * spread
        if trial == 1:
            x = x.round()  # many equals
        if trial == 2:
            x[:, ::3] = float("-inf")
        if trial == 3:
            x[0], x[1, 1:] = 1.5, -1e9
        k = torch.tensor([0, 1, 5, min(width, 40), 0, width])
        p = torch.tensor([0.9, 1.0, 0.5, 0.99, 0.1, 1.0])
        least = torch.tensor([0.0, 0.0, 0.05, 0.0, 0.2, 0.01])
        expected = ops_sampling.filter_logits(x.clone(), k, p, least)
        arguments = (t.to(DEVICE) for t in (x.clone(), k, p, least))
        assert torch.equal(filtering.filter_logits(*arguments).cpu(), expected), (width, trial)


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("rows", [1, 5])
def test_step_state_equals_the_references(width: int, rows: int) -> None:
    from fastdeploy_core.reference.ops import step as ops_step

    from fd_cuda.kernels import step

    torch.manual_seed(0)
    slots = torch.tensor([2, 6, 0, 5, 6])[:rows]  # slot 6 is the padding slot
    tables = torch.randint(0, 40, (7, 11), dtype=torch.int32)
    computed, newest = torch.randint(0, 20, (7,)), torch.randint(0, 99, (7,))
    drafts, num_drafts = torch.randint(0, 99, (7, 2)), torch.randint(0, width, (7,))
    computed[-1] = num_drafts[-1] = 0
    room = computed + torch.tensor([9, 9, 1, 9, 9, 0, 0])  # row 5 has none

    def outputs() -> list[torch.Tensor]:
        shapes = [(rows * width,)] * 3
        found = [torch.full(shape, -7) for shape in shapes]
        found += [torch.full((rows,), -7).int(), torch.full((rows, 11), -7).int()]
        return found

    state = (slots, tables, computed, newest, drafts, num_drafts, room)
    expected, got = outputs(), [t.to(DEVICE) for t in outputs()]
    turns = [torch.tensor([2**31 - 2]), torch.tensor([2**31 - 2], device=DEVICE)]
    ops_step.prepare_decode(*state, 4, turns[0], *expected)
    step.prepare_decode(*(t.to(DEVICE) for t in state), 4, turns[1], *got)
    assert int(turns[0]) == int(turns[1]) == 2**31 - 1

    def boxes() -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [(torch.full((3, rows, 5), -5, device=turn.device), turn) for turn in turns]

    for mine, theirs in zip(got, expected, strict=True):
        assert torch.equal(mine.cpu(), theirs)
    for n, num_results in ((1, 0), (2, width)):
        proposals, limit = torch.randint(-1, 60, (rows, n)), torch.tensor([width])
        results = torch.randint(-2, 60, (rows, num_results))
        theirs = (drafts.clone(), num_drafts.clone())
        mine = tuple(t.to(DEVICE) for t in theirs)
        given = (slots, proposals, results, limit)
        posts = boxes()
        taken = ops_step.keep_drafts(*given, 50, computed, room, *theirs, posts[0])
        places = (t.to(DEVICE) for t in (computed, room))
        moved = (t.to(DEVICE) for t in given)
        found = step.keep_drafts(*moved, 50, *places, *mine, posts[1])
        both = zip((*mine, found, posts[1][0]), (*theirs, taken, posts[0][0]), strict=True)
        for ours, reference in both:
            assert torch.equal(ours.cpu(), reference)
    drawn = torch.randint(0, 3, (rows * width,))
    marked = torch.where(torch.rand(rows * width) < 0.2, -3, drawn)
    peaks = torch.where(torch.rand(rows * width) < 0.2, float("nan"), torch.rand(rows * width))
    for given in ((slots, drawn, marked, None), (slots, drawn, drawn, peaks)):
        held = (drafts % 3, num_drafts)
        theirs = (computed.clone(), newest.clone(), torch.full((rows, width), -9))
        mine = tuple(t.to(DEVICE) for t in theirs)
        posts = boxes() if given[3] is None else [None, None]
        wanted = ops_step.finish_decode(*given, *held, *theirs, posts[0])
        moved = (None if t is None else t.to(DEVICE) for t in given)
        last = step.finish_decode(*moved, *(t.to(DEVICE) for t in held), *mine, posts[1])
        assert torch.equal(last.cpu(), wanted)
        assert posts[0] is None or torch.equal(posts[1][0].cpu(), posts[0][0])
        for ours, reference in zip(mine[:2], theirs[:2], strict=True):
            assert torch.equal(ours.cpu()[:-1], reference[:-1])
        assert torch.equal(mine[2].cpu(), theirs[2])


@pytest.mark.parametrize("rows", [1, 5, 130])
def test_placed_tokens_equal_the_references(rows: int) -> None:
    from fastdeploy_core.reference.ops import step as ops_step

    from fd_cuda.kernels import step

    torch.manual_seed(0)
    positions, room = torch.randint(0, 24, (rows,)), torch.randint(0, 28, (rows,))
    tables = torch.randint(0, 99, (rows, 7), dtype=torch.int32)
    found = step.place_tokens(*(t.to(DEVICE) for t in (positions, room, tables)), 4)
    wanted = ops_step.place_tokens(positions, room, tables, 4)
    for ours, reference in zip(found, wanted, strict=True):
        assert torch.equal(ours.cpu(), reference)


def test_histories_equal_the_references() -> None:
    from fastdeploy_core.reference.ops import history as ops_history

    from fd_cuda.kernels import history

    torch.manual_seed(0)
    slots = torch.tensor([2, 0, 3, 4])  # slot 4 is the padding slot
    computed, width = torch.tensor([20, 7, 3, 1, 0]), 3
    given = torch.randint(0, 3, (5, 2100), dtype=torch.int32)
    results = torch.randint(0, 3, (4, width))
    results[0, 1:] = results[2, 2:] = -1
    expected, got = given.clone(), given.to(DEVICE)
    ops_history.append_history(slots, results, computed, expected)
    moved = [t.to(DEVICE) for t in (slots, results, computed)]
    history.append_history(*moved, got)
    assert torch.equal(got.cpu()[:-1], expected[:-1])
    known = torch.tensor([2080, 1, 40, 0])
    for least, most, number in ((1, 4, 3), (2, 5, 1), (8, 12, 6)):
        wanted = ops_history.match_ngrams(expected, slots, known, least, most, number)
        found = history.match_ngrams(got, moved[0], known.to(DEVICE), least, most, number)
        assert torch.equal(found.cpu()[:3], wanted[:3])


@pytest.mark.parametrize(("width", "dtype"), [(5, torch.uint8), (9001, torch.int32)])
def test_sums_of_blocks_are_the_formulas(width: int, dtype: torch.dtype) -> None:
    """Wide ones need several programs each; words are signed, and their products overflow."""
    from fd_cuda.kernels.cache import sum_blocks

    info = torch.iinfo(dtype)
    words = torch.randint(info.min, info.max, (6, width), dtype=dtype, device=DEVICE)
    blocks = torch.tensor([4, 0, 4, 5], device=DEVICE)
    found = sum_blocks(words, blocks).tolist()
    for block, total in zip(blocks.tolist(), found, strict=True):
        row = enumerate(words[block].tolist())
        expected = sum((2 * n + 1) * 0x9E3779B1 * word for n, word in row)
        assert (total - expected) % 2**64 == 0
