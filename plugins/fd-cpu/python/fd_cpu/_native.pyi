"""What src/module.cpp defines. Tensors are addresses: callers check shapes, dtypes and contiguity,
and keep the memory alive."""

from collections.abc import Sequence

def available_isas() -> list[str]: ...
def make_packed(
    kind: int, outputs: int, inputs: int, group: int, gated: bool, /
) -> PackedMatrix: ...
def make_coded(outputs: int, inputs: int, gated: bool, num_patches: int, /) -> PackedMatrix: ...
def set_tet(
    matrix: PackedMatrix, strands: int, scales: int, signs: int, rotation: int, /
) -> None: ...

class PackedMatrix:
    @property
    def outputs(self) -> int: ...
    @property
    def inputs(self) -> int: ...
    @property
    def gated(self) -> bool: ...
    @property
    def group(self) -> int: ...
    @property
    def num_groups(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def kind(self) -> int: ...
    @property
    def num_patches(self) -> int: ...
    @property
    def has_sound_patches(self) -> bool: ...
    rotation: int
    @property
    def memory(self) -> list[list[int]]: ...
    def get_rows(self, first: int, count: int, values: int, /) -> None: ...

class Plan:
    def __init__(self) -> None: ...
    def __len__(self) -> int: ...
    def follow(self, before: Plan, /) -> None: ...

class AttentionShape:
    def __init__(self, sizes: Sequence[int], scale: float, softcap: float, /) -> None: ...

class Experts:
    def __init__(
        self, gate_up: Sequence[PackedMatrix], down: Sequence[PackedMatrix], /
    ) -> None: ...

class Runtime:
    def __init__(self, num_threads: int, cpus: Sequence[int], isa: str, /) -> None: ...
    @property
    def isa(self) -> str: ...
    @property
    def num_threads(self) -> int: ...
    def begin(self, plan: Plan, /) -> None: ...
    def end(self) -> None: ...
    def replay(self, plans: Sequence[Plan], times: int) -> None: ...
    def stay_away(self, is_away: bool) -> None: ...
    def begin_profile(self) -> None: ...
    def times(self) -> dict[str, tuple[int, float]]: ...
    def set_rows(
        self, matrix: PackedMatrix, count: int, values: int, dtype: int, stride: int, /
    ) -> None: ...
    def code_rows(
        self, count: int, width: int, values: int, stride: int, gated: bool, /
    ) -> PackedMatrix | None: ...
    def set_quantized_rows(
        self, matrix: PackedMatrix, count: int, values: int, scales: int, in_pairs: bool, /
    ) -> None: ...
    def linear(
        self,
        weight: PackedMatrix,
        x: int,
        x_type: int,
        num_rows: int,
        x_stride: int,
        norm_weight: int,
        eps: float,
        bias: int,
        residual: int,
        y: int,
        y_type: int,
        y_stride: int,
        /,
    ) -> None: ...
    def add_norm(
        self,
        x: int,
        update: int,
        total: int,
        weight: int,
        eps: float,
        y: int,
        type: int,
        num_rows: int,
        width: int,
        /,
    ) -> None: ...
    def gate(self, x: int, y: int, type: int, num_rows: int, width: int, /) -> None: ...
    def embedding(
        self,
        ids: int,
        table: int,
        packed: PackedMatrix | None,
        y: int,
        type: int,
        num_ids: int,
        num_rows: int,
        width: int,
    ) -> None: ...
    def attention(
        self, shape: AttentionShape, addresses: Sequence[int], sizes: Sequence[int], /
    ) -> None: ...
    def experts(
        self,
        experts: Experts,
        x: int,
        ids: int,
        weights: int,
        y: int,
        type: int,
        num_tokens: int,
        width: int,
        top_k: int,
        /,
    ) -> None: ...
    def greedy(self, logits: int, num_rows: int, width: int, ids: int, peaks: int, /) -> None: ...
    def greedy_linear(
        self,
        weight: PackedMatrix,
        x: int,
        x_type: int,
        num_rows: int,
        x_stride: int,
        bias: int,
        ids: int,
        peaks: int,
        /,
    ) -> None: ...
    def head_norm(
        self,
        q: int,
        k: int,
        q_weight: int,
        k_weight: int,
        eps: float,
        type: int,
        num_tokens: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        q_stride: int,
        k_stride: int,
        /,
    ) -> None: ...
    def select_rows(
        self, x: int, index: int, y: int, num_rows: int, row_bytes: int, row_stride: int, /
    ) -> None: ...
    def count_tokens(self, starts: int, num_seqs: int, /) -> None: ...
    def prepare_decode(self, addresses: Sequence[int], sizes: Sequence[int], /) -> None: ...
    def finish_decode(self, addresses: Sequence[int], sizes: Sequence[int], /) -> None: ...
    def keep_results(
        self,
        slots: int,
        results: int,
        num_computed: int,
        kept: int,
        num_rows: int,
        num_kept: int,
        num_slots: int,
        /,
    ) -> None: ...
    def mark_broken(
        self, drawn: int, peaks: int, possible: int, marked: int, num_rows: int, /
    ) -> None: ...
    def route(
        self,
        logits: int,
        bias: int,
        ids: int,
        weights: int,
        num_tokens: int,
        num_experts: int,
        top_k: int,
        num_groups: int,
        top_k_groups: int,
        is_sigmoid: bool,
        renormalize: bool,
        scaling_factor: float,
        /,
    ) -> None: ...
    def sample(
        self,
        logits: int,
        num_rows: int,
        width: int,
        seeds: int,
        positions: int,
        ids: int,
        is_random: int,
        ahead: int,
        /,
    ) -> None: ...
    def temper(self, logits: int, num_rows: int, width: int, temperatures: int, /) -> None: ...
    def filter(
        self, logits: int, num_rows: int, width: int, top_k: int, top_p: int, min_p: int, /
    ) -> None: ...
    def penalize(
        self,
        logits: int,
        num_rows: int,
        width: int,
        factors: Sequence[int],
        counts: int,
        count_bytes: int,
        prompt_seen: int,
        /,
    ) -> None: ...
    def mask(self, logits: int, num_rows: int, width: int, bits: int, /) -> None: ...
    def log_softmax(self, logits: int, num_rows: int, width: int, y: int, /) -> None: ...
