"""Which experts each token visited, told with an answer and taken again with a prompt.

A trainer that computes an answer's log-probabilities itself chooses other experts here and there
(Ma et al. 2025, arXiv 2510.11370); given the ones that were visited, it computes what the engine
did, and so does an engine with other weights. Routes are numbers of experts, [tokens, layers with
experts, experts of a token] int16; as text they are base64 of that in little-endian C order.

A layer computes what is needed of it: experts of a prompt's tokens whose hidden states nobody reads
are unknown in the last layer, and matter to nothing that is told.

Routes are kept with the place of a token's key and value. So they are there for tokens whose prefix
was cached, and after a preemption.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from fastdeploy_core.errors import ConfigError, InvalidRequest, WorkerError
from fastdeploy_core.types import SequenceExtras

if TYPE_CHECKING:
    from fastdeploy_core.config import EngineConfig
    from fastdeploy_core.contracts.attention import AttentionBatch
    from fastdeploy_core.contracts.device import DeviceBackend
    from fastdeploy_core.contracts.moe import RoutingSpec
    from fastdeploy_core.loading.loader import LoadedModel
    from fastdeploy_core.tensor import Tensor
    from fastdeploy_core.types import ModelRunnerOutput, SchedulerOutput
    from fastdeploy_core.worker.results import PendingOutput

UNKNOWN: Final = -1  # in place of an expert: nobody has seen the token
_DTYPE: Final = np.dtype("<i2")
_FLOORS: Final = {"softmax": 1e-12, "sigmoid": 1e-20}  # of divisors, as in the operation


def encode(routes: np.ndarray) -> str:
    """The text of routes [tokens, layers, experts]."""
    return base64.b64encode(routes.astype(_DTYPE).tobytes()).decode("ascii")


def decode(text: str, num_layers: int, top_k: int, num_experts: int) -> np.ndarray:
    """Routes [tokens, num_layers, top_k] int16; InvalidRequest for anything else."""
    try:
        raw = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest(
            f"routed_experts is no base64: {error}", param="routed_experts"
        ) from error
    size = num_layers * top_k * _DTYPE.itemsize
    if not raw or len(raw) % size:
        raise InvalidRequest(
            f"routed_experts has {len(raw)} bytes; each token has {num_layers} layers of {top_k} "
            f"int16, {size} bytes",
            param="routed_experts",
        )
    routes = np.frombuffer(raw, dtype=_DTYPE).reshape(-1, num_layers, top_k)
    is_whole = (routes >= 0).all(2) | (routes == UNKNOWN).all(2)
    if not is_whole.all() or routes.max() >= num_experts:
        raise InvalidRequest(
            f"routed_experts names others than experts 0 to {num_experts - 1}; {UNKNOWN} for all "
            "of a token's experts in a layer leaves it to the router",
            param="routed_experts",
        )
    return routes


def routed_extras(text: str, extras: SequenceExtras | None) -> SequenceExtras:
    """Part `routed-experts`: what a request says whose first tokens visit these experts."""
    if not text:
        raise InvalidRequest("routed_experts must not be empty", param="routed_experts")
    return msgspec.structs.replace(extras or SequenceExtras(), routes=text)


class WatchedKernels:
    """A kernel table from which blocks of experts take their routing, each its own."""

    def __init__(self, kernels: Any, routes: Routes) -> None:
        self._kernels, self._routes = kernels, routes

    def watched_routing(self, spec: RoutingSpec) -> Callable[..., tuple[Tensor, Tensor]]:
        """The operation moe_routing of the next block."""
        return self._routes.add_layer(self._kernels["moe_routing"], spec)

    def __getitem__(self, operation: str) -> Callable[..., Any]:
        """The kernel for the operation."""
        found: Callable[..., Any] = self._kernels[operation]
        return found

    def __contains__(self, operation: object) -> bool:
        return operation in self._kernels

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)


@dataclass(slots=True)
class _Step:
    """What one step has chosen, until its results are read."""

    batch: AttentionBatch
    places: np.ndarray  # [T] int64: where its tokens' keys and values lie
    read: np.ndarray  # [n] int64: the tokens whose hidden states are read
    given: Tensor | None = None  # [T, layers, experts]: to be visited; UNKNOWN: the router's choice
    # Of each layer [T, experts]; the last ones may go on with the tokens of `read` alone.
    chosen: list[Tensor] = field(default_factory=list)


class Routes:
    """A model's record, on one rank, a StepPart. A step's rows are noted when they are laid out,
    its choices when its layers make them, and both are kept when its results are read."""

    features = frozenset({"routed_experts"})

    def __init__(self, config: EngineConfig, device: DeviceBackend) -> None:
        self._config, self._block_size = config, config.cache.block_size
        self._device, self._xp = device, device.xp
        self._layers: list[RoutingSpec] = []
        self._is_watching = False  # a step of the engine's, and not one that measures memory
        self._step: _Step | None = None
        self._kept = np.zeros((0, 0, 0), dtype=_DTYPE)  # by place
        self._given: dict[int, np.ndarray] = {}  # by slot: what its prompt brought

    def add_layer(
        self, kernel: Callable[..., tuple[Tensor, Tensor]], spec: RoutingSpec
    ) -> Callable[..., tuple[Tensor, Tensor]]:
        """The routing of the next block of experts; kernel: the operation."""
        self._layers.append(spec)
        return partial(self._choose, kernel, len(self._layers) - 1)

    def attach(self, loaded: LoadedModel) -> None:
        """The model is there; ConfigError where routes cannot be had."""
        check(self._config, loaded, self._device, self._layers)
        loaded.builder.parts.append(self)

    def add(self, slot: int, extras: SequenceExtras) -> None:
        """A sequence has got a slot; InvalidRequest: its routes are none."""
        if not extras.routes:
            return
        shape = len(self._layers), self._layers[0].top_k
        self._given[slot] = decode(extras.routes, *shape, self._layers[0].num_experts)

    def reset(self, slot: int) -> None:
        """The sequence's slot is free."""
        self._given.pop(slot, None)

    def launch(
        self, step: SchedulerOutput, launch: Callable[[SchedulerOutput], PendingOutput]
    ) -> RoutedOutput:
        """Queue a step and watch it."""
        self._is_watching, self._step = True, None
        try:
            pending = launch(step)
        finally:
            self._is_watching = False
        return RoutedOutput(self, pending, self._step, step.copies.device_to_device)

    def _choose(
        self,
        kernel: Callable[..., tuple[Tensor, Tensor]],
        number: int,
        logits: Tensor,
        bias: Tensor | None,
        spec: RoutingSpec,
    ) -> tuple[Tensor, Tensor]:
        ids, weights = kernel(logits, bias, spec)
        step = self._step if self._is_watching else None
        if step is None:
            return ids, weights
        if step.given is not None:
            xp, given = self._xp, step.given[:, number].to(ids.dtype)
            if given.shape[0] != ids.shape[0]:
                given = xp.index_select(given, 0, self._device.to_device(step.read))
            wanted = xp.where(given >= 0, given, ids)
            # Where the choice is the same the weights are, too, to the last bit.
            differs = (wanted != ids).sum(-1, keepdim=True) > 0
            weights = xp.where(differs, _weights(xp, logits, wanted, spec), weights)
            ids = wanted
        step.chosen.append(ids)
        return ids, weights

    def copy(self, blocks: Sequence[tuple[int, int]]) -> None:
        """Blocks were copied, (source, target), before what is kept next."""
        size = self._block_size
        for source, target in blocks:
            found = self._kept[source * size : (source + 1) * size]
            self._keep_at(np.arange(target * size, target * size + len(found)), found)

    def keep(self, step: _Step) -> None:
        """The step's results are there."""
        if len(step.chosen) != len(self._layers):
            raise WorkerError(
                f"{len(step.chosen)} of {len(self._layers)} blocks of experts chose in a step"
            )
        self._keep_at(step.places, UNKNOWN)
        for number, ids in enumerate(step.chosen):
            places = step.places
            if ids.shape[0] != places.size:
                places = places[step.read]
            self._kept[places, number] = self._xp.to_numpy(ids)
        step.chosen.clear()

    def _keep_at(self, places: np.ndarray, routes: Any) -> None:
        most = int(places.max(initial=0)) + 1
        if len(self._kept) < most:
            shape = len(self._layers), self._layers[0].top_k
            grown = np.full((2 * most, *shape), UNKNOWN, dtype=_DTYPE)
            grown[: len(self._kept)] = self._kept.reshape(-1, *shape)
            self._kept = grown
        self._kept[places] = routes

    def of_row(self, batch: AttentionBatch, row: int) -> bytes:
        """The text of all tokens of a row's sequence that were computed with this step."""
        places = self._places(batch.block_tables[row], np.arange(batch.seq_lens[row]))
        return encode(self._kept[places]).encode("ascii")

    def _places(self, table: np.ndarray, positions: np.ndarray) -> np.ndarray:
        blocks, within = np.divmod(positions, self._block_size)
        places: np.ndarray = table[blocks].astype(np.int64) * self._block_size
        places += within
        return places

    def lay_out(self, rows: np.ndarray, batch: AttentionBatch, read: np.ndarray | None) -> None:
        """See StepPart."""
        if not self._is_watching:
            return
        starts = batch.seq_lens - np.diff(batch.cu_seqlens_q)
        spans = [np.arange(*span) for span in zip(starts, batch.seq_lens, strict=True)]
        places = [
            self._places(table, positions)
            for table, positions in zip(batch.block_tables, spans, strict=True)
        ]
        read = np.arange(batch.num_tokens) if read is None else read
        step = self._step = _Step(batch, np.concatenate(places), read)
        given = [self._given_to(slot, at) for slot, at in zip(rows.tolist(), spans, strict=True)]
        if any((one >= 0).any() for one in given):
            step.given = self._device.to_device(np.concatenate(given))

    def _given_to(self, slot: int, positions: np.ndarray) -> np.ndarray:
        """[tokens, layers, experts] int64 for a slot's tokens at these positions."""
        shape = len(self._layers), self._layers[0].top_k
        found = np.full((positions.size, *shape), UNKNOWN, dtype=np.int64)
        routes = self._given.get(slot)
        if routes is not None:
            is_given = positions < len(routes)
            found[is_given] = routes[positions[is_given]]
        return found


class RoutedOutput:
    """A step's PendingOutput, and the routes of what ends with it."""

    def __init__(
        self,
        routes: Routes,
        pending: PendingOutput,
        step: _Step | None,
        copies: Sequence[tuple[int, int]],
    ) -> None:
        self._routes, self._pending, self._step, self._copies = routes, pending, step, copies

    def done(self) -> bool:
        """See PendingOutput."""
        return self._pending.done()

    def wait(self) -> ModelRunnerOutput:
        """See PendingOutput."""
        found, step = self._pending.wait(), self._step
        self._routes.copy(self._copies)
        self._copies = ()
        if step is not None:
            self._routes.keep(step)
            found.pooled = _Asked(self._routes, step.batch)
            self._step = None
        return found


class _Asked(dict[int, bytes]):
    """ModelRunnerOutput.pooled; made for those rows alone that are asked for."""

    def __init__(self, routes: Routes, batch: AttentionBatch) -> None:
        super().__init__()
        self._routes, self._batch = routes, batch

    def get(self, row: int, default: Any = None) -> Any:
        return self._routes.of_row(self._batch, row)


def _weights(xp: Any, logits: Tensor, ids: Tensor, spec: RoutingSpec) -> Tensor:
    """What moe_routing weighs these experts with, [T, k] float32."""
    scores = xp.softmax(logits, -1) if spec.scoring == "softmax" else xp.sigmoid(logits)
    weights = xp.gather(scores, 1, ids)
    if spec.renormalize:
        floor = _FLOORS[spec.scoring]
        weights = weights / xp.clamp(weights.sum(dim=-1, keepdim=True), floor)
    return weights * spec.scaling_factor


def check(
    config: EngineConfig, loaded: LoadedModel, device: DeviceBackend, layers: list[RoutingSpec]
) -> None:
    """ConfigError where the host does not see each step's choices."""
    drivers = loaded.builder.moe_drivers.values()
    found = ""
    if not layers:
        found = "this model: it has no experts whose router chooses for each token"
    elif len({(layer.top_k, layer.num_experts) for layer in layers}) > 1:
        found = "this model: its layers have different numbers of experts"
    elif config.graphs.enabled and device.limits.graph_capture:
        found = "captured steps: add --enforce-eager"
    elif config.speculative is not None:
        found = "--speculative-config"
    elif loaded.builder.expert_ranks is not None:
        found = "--enable-expert-parallel"
    elif device.limits.step_buckets is not None:
        found = f"device {device.name}, which compiles each shape of a step"
    elif any(driver.unit == "gate" for driver in drivers):
        found = f"an expert driver of {device.name} that routes by itself"
    if found:
        raise ConfigError(f"--enable-return-routed-experts is not possible with {found}")
