"""The worker's side: adapters in slots on the device, and which row of a step has which.

Everything that a captured step reads lies at fixed addresses: the matrices of each slot, the slot
of each running sequence's adapter, and the slots of a prompt step's tokens. An adapter that is
needed and not there is read when its first sequence comes, alike on every rank, since the step's
message decides. It keeps its slot until others need the place and nobody uses it.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fastdeploy_core.errors import ConfigError, InvalidRequest, WorkerError
from fastdeploy_core.layers.experts import expert_specs

from .experts import AdaptedExperts, AdaptedMoE
from .files import read_folder
from .served import lora_settings, operators_adapters
from .targets import Half, Slots, Targets

if TYPE_CHECKING:
    from fastdeploy_core.config import EngineConfig
    from fastdeploy_core.contracts.attention import AttentionBatch
    from fastdeploy_core.contracts.device import DeviceBackend
    from fastdeploy_core.contracts.moe import MoEBackend, MoESpec
    from fastdeploy_core.contracts.ops import KernelTable
    from fastdeploy_core.contracts.quantizer import LayerSpec
    from fastdeploy_core.layers import ModelBuilder
    from fastdeploy_core.layers.stored import Piece
    from fastdeploy_core.tensor import Tensor
    from fastdeploy_core.types import SequenceExtras

logger = logging.getLogger(__name__)

NO_SLOT = -1


class StepRows:
    """The adapter slot of each row that layers work on: all tokens of a step, then those that the
    last layers go on with."""

    def __init__(self, device: DeviceBackend) -> None:
        self._xp = device.xp
        self.slots: Tensor = None  # [rows] int32
        self._all: Tensor = None
        self._chosen: Tensor = None
        self.is_idle = True  # no row has an adapter

    def begin(self, slots: Tensor, *, is_idle: bool) -> None:
        """A forward pass over these tokens begins."""
        self.slots = self._all = slots
        self._chosen, self.is_idle = None, is_idle

    def choose(self, rows: Tensor) -> None:
        """Layers go on with these of the tokens: an index as of kernel select_rows."""
        if not self.is_idle and self._chosen is not rows:
            self._chosen = rows
            self.slots = self._xp.index_select(self._all, 0, rows)


class WatchedKernels:
    """A kernel table that tells which rows layers go on with."""

    def __init__(self, kernels: KernelTable, rows: StepRows) -> None:
        self._kernels, self._rows = kernels, rows
        self._select, self._add_norm = kernels["select_rows"], kernels["add_rms_norm"]

    def __getitem__(self, operation: str) -> Callable[..., Any]:
        """The kernel for the operation."""
        if operation == "select_rows":
            return self._select_rows
        return self._add_rms_norm if operation == "add_rms_norm" else self._kernels[operation]

    def __contains__(self, operation: object) -> bool:
        return operation in self._kernels

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)

    def behind(self, operation: str, before: str) -> Callable[..., Any] | None:
        """As the table says; a norm takes a deferred addend by itself."""
        kernel = self._kernels.behind(operation, before)
        if kernel is None or before != "add_rms_norm":
            return kernel

        def after_norm(x: Tensor, residual: Any, norm: Tensor, eps: float, weight: Any) -> Any:
            if isinstance(residual, Deferred):
                return self._add_rms_norm(x, residual, norm, eps)
            return kernel(x, residual, norm, eps, weight)

        return after_norm

    def _select_rows(self, x: Any, index: Tensor) -> Any:
        self._rows.choose(index)
        if isinstance(x, Deferred):
            return replace(x, x=self._select(x.x, index))
        return self._select(x, index)

    def _add_rms_norm(
        self, x: Tensor, residual: Any, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        both: tuple[Tensor, Tensor]
        if isinstance(residual, Deferred):
            both = self._kernels["deferred_norm"](
                x, residual.operands, weight, eps, self._rows.slots
            )
        else:
            both = self._add_norm(x, residual, weight, eps)
        return both


@dataclass(frozen=True, slots=True)
class Deferred:
    """An addend of the residual stream that is not computed yet: what adapters add to a product
    onto the residual. The norm that reads the sum computes it."""

    x: Tensor  # the product's input
    layer: AdaptedLinear

    @property
    def operands(self) -> tuple[Tensor, Tensor, Tensor]:
        """The input, a and b, as kernels take them."""
        slots = self.layer.slots
        return self.x, slots.a, slots.b

    def __radd__(self, total: Tensor) -> Tensor:
        """total + this, for those who read the sum without a norm."""
        return self.layer(total.clone(), self.x)


class AdaptedLinear:
    """The slots of one linear layer."""

    def __init__(
        self,
        rows: StepRows,
        kernels: KernelTable,
        slots: Slots,
        ends: tuple[int, ...],
    ) -> None:
        self._rows, self._kernels, self.slots, self._ends = rows, kernels, slots, ends
        self._kernel = kernels["lora"]

    def __call__(
        self, y: Tensor, x: Tensor, norm_weight: Tensor | None = None, eps: float = 0.0
    ) -> Tensor:
        """y [num_tokens, out_features of this rank] and, maybe in its place, what the rows'
        adapters add for x [num_tokens, in_features of this rank], or for rms_norm(x). Rows without
        an adapter stay as they are."""
        if self._rows.is_idle:
            return y
        return self._kernel(y, x, norm_weight, eps, *self._adapters(x))

    def products(self, *, feeds_norm: bool) -> tuple[Callable[..., Any], ...]:
        """linear, norm_linear, gated_linear and linear_add of the kernel table with what adapters
        add, for a weight that is prepared for "linear". The two after a norm may be given a
        residual that `takes` is true of, and return (y, x + residual) then. The last one returns
        two addends, as Linear.add_to; feeds_norm: a norm reads their sum."""

        def linear(x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
            return self._product("plain", x, None, 0.0, weight, bias)

        def linear_add(
            x: Tensor, weight: Any, bias: Tensor | None, residual: Tensor
        ) -> tuple[Tensor, Deferred | None]:
            kernels = self._kernels
            if feeds_norm and "deferring_add" in kernels and not self._rows.is_idle:
                a, b, _, _ = self._adapters(x)
                y = kernels["deferring_add"](x, weight, bias, residual, a, b)
                if y is not None:
                    return y, Deferred(x, self)
            return self._product("add", x, None, 0.0, weight, bias, residual), None

        norm_linear, gated_linear = (partial(self._after_norm, e) for e in ("plain", "gated"))
        return linear, norm_linear, gated_linear, linear_add

    def takes(self, residual: Any) -> bool:
        """Whether products after a norm may be given it."""
        return isinstance(residual, Deferred)

    def _after_norm(
        self,
        epilogue: str,
        x: Tensor,
        norm: Tensor | None,
        eps: float,
        weight: Any,
        bias: Tensor | None,
        residual: Deferred | None = None,
    ) -> Any:
        if residual is None:
            return self._product(epilogue, x, norm, eps, weight, bias)
        kernel, deferred = self._kernels["deferred_product"], residual.operands
        return kernel(epilogue, x, deferred, norm, eps, weight, bias, *self._adapters(x))

    def _product(
        self,
        epilogue: str,
        x: Tensor,
        norm: Tensor | None,
        eps: float,
        weight: Any,
        bias: Tensor | None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """In one operation where the device has it, see adapted_product in kernels.py."""
        kernels, operands = self._kernels, (x, norm, eps, weight, bias)
        y: Tensor
        if "adapted_product" in kernels and not self._rows.is_idle:
            joint = kernels["adapted_product"]
            y = joint(epilogue, *operands, residual, *self._adapters(x))
            return y
        if residual is not None:
            y = kernels["linear_add"](x, weight, bias, residual)
        elif norm is not None:
            y = kernels["norm_linear"](*operands)
        else:
            y = kernels["linear"](x, weight, bias)
        y = self(y, x, norm, eps)
        return kernels["silu_and_mul"](y) if epilogue == "gated" else y

    def _adapters(self, x: Tensor) -> tuple[Any, ...]:
        """a, b, ends and slots, as the kernels take them."""
        rows, slots = self._rows, self.slots
        if rows.slots.shape[0] != x.shape[0]:
            raise WorkerError(
                f"a layer with adapters was given {x.shape[0]} rows in a step of "
                f"{rows.slots.shape[0]}; this model cannot be served with --enable-lora"
            )
        return slots.a, slots.b, self._ends, rows.slots


class AdapterLayers:
    """layers.builder.Adapters."""

    features = frozenset({"adapter"})

    def __init__(
        self, config: EngineConfig, device: DeviceBackend, kernels: KernelTable, family: type[Any]
    ) -> None:
        _check(device, family)
        self._config, self._lora = config, lora_settings(config)
        self._device, self._xp = device, device.xp
        self._kernels, self._rows = kernels, StepRows(device)
        self._targets = Targets(device, config.model.dtype, self._lora.max_lora_rank)
        self._layers: list[Slots] = []
        self._has_experts = _changes_experts(config)
        self._targets.why_no_experts = (
            "; this model's experts are multiplied by a driver of their own kind"
            if self._has_experts
            else "; routed experts can be with --lora-experts, which takes memory for them"
        )
        self._free = list(range(self._lora.max_loras))
        self._slot_of: OrderedDict[str, int] = OrderedDict()  # least recently used first
        self._users: Counter[int] = Counter()  # sequences of each slot
        self._on_host: OrderedDict[str, list[Half]] = OrderedDict()  # likewise
        # By sequence's slot, the last one in place of none; and by token of a step laid out on the
        # host.
        batch = config.batch
        self._of_sequence = np.full(batch.max_num_seqs + 1, NO_SLOT, dtype=np.int32)
        self._of_sequence_dev = device.to_device(self._of_sequence.copy())
        most = max(batch.max_num_seqs, batch.max_num_batched_tokens)
        self._of_token = device.to_device(np.full(most, NO_SLOT, dtype=np.int32))
        self._num_marked = 0  # tokens at its beginning that the step before had
        self._is_idle = True  # the step that was laid out has no adapter
        self._captured_rows: Tensor = None

    def watch(self, kernels: KernelTable) -> WatchedKernels:
        """The table for layers: it notes which rows of a step they go on with."""
        return WatchedKernels(kernels, self._rows)

    def layer(
        self, build: ModelBuilder, spec: LayerSpec, pieces: Sequence[Piece], in_piece: Piece
    ) -> AdaptedLinear | None:
        """A layer is made. pieces: this rank's share of the outputs of each of its parts; in_piece:
        of the inputs. None where --lora-target-modules leaves it out."""
        wanted = self._lora.lora_target_modules
        names = {name.rpartition(".")[2] for name in (spec.name, *(p.name for p in spec.parts))}
        if wanted and not names.intersection(wanted):
            return None
        count, rank = self._lora.max_loras, self._lora.max_lora_rank
        dtype = build.xp.dtype(spec.dtype)
        slots = Slots(
            build.zeros((count, len(spec.parts) * rank, spec.in_features), dtype),
            build.zeros((count, spec.out_features, rank), dtype),
        )
        self._layers.append(slots)
        self._targets.canonical = build.weights.canonical
        self._targets.add(slots, spec, pieces, in_piece)
        ends = np.cumsum([part.out_features for part in spec.parts]).tolist()
        return AdaptedLinear(self._rows, self._kernels, slots, tuple(ends))

    def experts(
        self, build: ModelBuilder, prefix: str, spec: MoESpec, driver: MoEBackend
    ) -> MoEBackend:
        """A block of routed experts is made, `prefix` ends in .experts. Returns the driver, with
        what adapters add where they may change experts."""
        if not self._has_experts:
            return driver
        if driver.unit == "gate":
            raise ConfigError(
                f"MoE driver {driver.name!r} chooses experts itself, and adapters cannot change "
                "them; leave out --lora-experts, or choose another --moe-backend"
            )
        count, rank = self._lora.max_loras, self._lora.max_lora_rank
        dtype, num_experts = build.xp.dtype(spec.dtype), spec.routing.num_experts
        gate_up, down = (
            Slots(
                build.zeros((count * num_experts, len(own.parts) * rank, own.in_features), dtype),
                build.zeros((count * num_experts, own.out_features, rank), dtype),
                num_experts,
            )
            for own in expert_specs(prefix, spec)
        )
        self._layers += [gate_up, down]
        self._targets.canonical = build.weights.canonical
        self._targets.add_experts(prefix, spec, gate_up, down, build.piece)
        adapters = AdaptedExperts(self._rows, self._kernels, spec, gate_up, down)
        return AdaptedMoE(driver, adapters, build, spec)

    def attach(self, rows: Tensor) -> None:
        """The model is there: adapters that the operator named have to fit it. rows [max_num_seqs]
        int64, on the device: the slots of a captured step's rows."""
        self._captured_rows = rows
        if self._lora.lora_experts and not self._targets.has_experts:
            raise ConfigError(
                "--lora-experts: this model has no routed experts that adapters can change; leave "
                "it out"
            )
        for name, extras in operators_adapters(self._config).items():
            try:
                self._halves(extras)
            except InvalidRequest as error:
                raise ConfigError(f"--lora-modules {name}: {error}") from error

    # -- a step -----------------------------------------------------------------------------------

    def lay_out(self, rows: np.ndarray, batch: AttentionBatch, read: np.ndarray | None) -> None:
        """See StepPart. Tokens after these have no adapter, for a captured step may be larger than
        what it is given."""
        counts = np.diff(batch.cu_seqlens_q)
        of_row = self._of_sequence[rows]
        self._is_idle = bool((of_row == NO_SLOT).all())
        of_token = np.repeat(of_row, counts)
        size = 0 if self._is_idle else of_token.size
        most = max(size, self._num_marked)
        if most:
            padded = np.full(most, NO_SLOT, dtype=np.int32)
            padded[:size] = of_token[:size]
            self._of_token[:most] = self._device.to_device(padded)
        self._num_marked = size

    def begin(self, batch: AttentionBatch) -> None:
        """A forward pass of this batch is queued or captured next. A captured decode step finds
        its sequences' slots on the device; others were laid out."""
        num_rows, width = batch.num_seqs, batch.tokens_per_row
        if batch.is_exact or not width:
            of_token = self._of_token[: batch.num_tokens]
            self._rows.begin(of_token, is_idle=batch.is_exact and self._is_idle)
            return
        rows = self._captured_rows[:num_rows]
        of_row = self._xp.index_select(self._of_sequence_dev, 0, rows)
        if width > 1:
            of_row = of_row.unsqueeze(1).expand([num_rows, width]).reshape([num_rows * width])
        self._rows.begin(of_row, is_idle=False)

    # -- sequences and their adapters -------------------------------------------------------------

    def add(self, slot: int, extras: SequenceExtras) -> None:
        """A sequence with this adapter has got a slot; it is read if it is not there.
        InvalidRequest: it cannot be used."""
        if not extras.adapter:
            return
        number = self._slot_of.get(extras.adapter)
        if number is None:
            number = self._load(extras)
        self._slot_of.move_to_end(extras.adapter)
        self._users[number] += 1
        self._point(slot, number)

    def reset(self, slot: int) -> None:
        """The sequence's slot is free. Its adapter stays where it is."""
        number = int(self._of_sequence[slot])
        if number != NO_SLOT:
            self._users[number] -= 1
            self._point(slot, NO_SLOT)

    def _point(self, slot: int, number: int) -> None:
        self._of_sequence[slot] = number
        self._of_sequence_dev[slot : slot + 1] = number

    def _load(self, extras: SequenceExtras) -> int:
        """Fill a slot that nobody uses."""
        halves = self._halves(extras)
        if not self._free:
            unused = next((a for a, n in self._slot_of.items() if not self._users[n]), None)
            if unused is None:  # the scheduler starts no sequence that finds no slot
                raise WorkerError(f"all {self._lora.max_loras} slots of adapters are in use")
            self._free.append(self._slot_of.pop(unused))
        number = self._free[-1]
        for slots in self._layers:
            slots.clear(number)
        for half in halves:
            half.put(number, self._xp.to_device(half.matrix, self._device.device))
        self._slot_of[extras.adapter] = self._free.pop()
        logger.info("adapter %s is in slot %d", extras.adapter, number)
        return number

    def _halves(self, extras: SequenceExtras) -> list[Half]:
        """The adapter on the host, where the last --max-cpu-loras stay."""
        found = self._on_host.get(extras.adapter)
        if found is None:
            folder = read_folder(Path(extras.adapter_path))
            if folder.digest != extras.adapter.rpartition("@")[2]:
                raise InvalidRequest(
                    f"the files of adapter {extras.adapter} in {folder.path} have changed since it "
                    "was loaded; load it again"
                )
            found = self._on_host[extras.adapter] = self._targets.halves(folder)
            if len(self._on_host) > max(self._lora.max_cpu_loras, self._lora.max_loras):
                self._on_host.popitem(last=False)
        self._on_host.move_to_end(extras.adapter)
        return found


def _changes_experts(config: EngineConfig) -> bool:
    """Whether slots have room for routed experts. ConfigError for what they cannot be had with."""
    if not lora_settings(config).lora_experts:
        given = operators_adapters(config).values()
        if not any(read_folder(Path(one.adapter_path)).changes_experts for one in given):
            return False
    if config.parallel.divides_experts:
        raise ConfigError(
            "adapters change routed experts where every rank has a share of each; leave out "
            "--enable-expert-parallel, or --lora-experts and adapters that change experts"
        )
    if config.model.weight_cache:
        raise ConfigError(
            "the weight cache keeps no weights of experts that adapters change; leave out "
            "--weight-cache, or --lora-experts and adapters that change experts"
        )
    return True


def _check(device: DeviceBackend, family: type[Any]) -> None:
    """ConfigError for what adapters cannot be had with."""
    if device.limits.step_buckets is not None:
        raise ConfigError(
            f"device {device.name!r} compiles each shape of a step, and adapters are not part of "
            "such steps; leave out --enable-lora, or choose another --device"
        )
    if hasattr(family, "encode"):
        raise ConfigError(
            f"{family.__name__} takes pictures, and adapters of such models are not part of this "
            "version; leave out --enable-lora"
        )
