"""What vision towers are made of, over the core's layers: patches to hidden states.

A family's tower says which norms, products and activations its blocks have, and what becomes of
their hidden states. Every rank holds all of it. Patches attend to those of the same frame (in
Qwen's models: of the same frame pair), in some layers to those of the same window. Patches of such
a run lie side by side. Where the device has no attention over packed runs, it is computed for all
runs of one length together. Lengths come from the grids, which the host knows, so nothing
waits for the device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fastdeploy_core.contracts.device import AttendingDevice
from fastdeploy_core.errors import ConfigError
from fastdeploy_core.layers import Placement
from fastdeploy_core.models.reading import ConfigReader

if TYPE_CHECKING:
    from fastdeploy_core.layers import Linear, ModelBuilder
    from fastdeploy_core.tensor import Tensor
    from fastdeploy_core.types import MediaItem

    Rows = Callable[[Tensor], Tensor]  # a norm, a product, or some of them: [n, a] to [n, b]

ROPE_THETA = 10000.0  # unless vision_config says otherwise
MAX_SCORES = 2**26  # attention logits held at a time
Grid = tuple[int, int, int]


@dataclass(frozen=True)
class TowerShape:
    """Sizes of a tower."""

    depth: int
    hidden: int
    heads: int
    intermediate: int
    patch: int  # side in pixels
    merge: int  # patches of a side that become one vector
    frames: int  # that one patch covers
    activation: str
    # Cells of a window's side, a cell being the patches of one vector; 0: no windows.
    window: int = 0
    full: frozenset[int] = frozenset()  # layers that see beyond their window
    theta: float = ROPE_THETA

    @property
    def head(self) -> int:
        """Width of a head."""
        return self.hidden // self.heads

    @property
    def cell(self) -> int:
        """Width of the patches of one vector, joined."""
        return self.hidden * self.merge**2


def vision_reader(config: Mapping[str, Any]) -> ConfigReader:
    """Reads vision_config; ConfigError if there is none, or if it asks for other than RGB."""
    vision, names = config.get("vision_config"), config.get("architectures") or ["model"]
    if not isinstance(vision, Mapping):
        raise ConfigError(f"config.json of this {names[0]} has no vision_config")
    read = ConfigReader({**vision, "architectures": [f"{names[0]}'s vision_config"]})
    if read.size("in_channels", "in_chans", "num_channels", default=3) != 3:
        raise ConfigError(f"vision_config of this {names[0]} asks for other channels than 3")
    return read


def tower_shape(read: ConfigReader, *, frames: int, activation: str, **more: Any) -> TowerShape:
    """The sizes in vision_config, by whichever of their names it has. `frames`: the family's, which
    vision_config cannot change. `activation`: where it does not say."""
    intermediate = read.config.get("intermediate_size")
    if intermediate is None:  # ERNIE's released folders say it so
        ratio = read.number("mlp_ratio", default=4.0)
        intermediate = int(read.size("hidden_size") * ratio)
    shape = TowerShape(
        depth=read.size("depth", "num_hidden_layers"),
        hidden=read.size("hidden_size"),
        heads=read.size("num_heads", "num_attention_heads"),
        intermediate=read.size("intermediate_size", default=intermediate),
        patch=read.size("patch_size"),
        merge=read.size("spatial_merge_size", default=2),
        frames=frames,
        activation=str(read.config.get("hidden_act", activation)),
        theta=_theta(read),
        **more,
    )
    if shape.hidden % shape.heads or shape.head % 4:
        raise ConfigError(
            f"vision_config has {shape.heads} heads of {shape.hidden} together; a head's size has "
            "to be a multiple of 4"
        )
    if read.config.get("head_dim") not in (None, shape.head):
        raise ConfigError(
            f"vision_config has head_dim={read.config['head_dim']!r}; possible: {shape.head}, its "
            "hidden_size divided by its heads"
        )
    return shape


def _theta(read: ConfigReader) -> float:
    """The base of a tower's rotary frequencies, which are of rows and columns ("axial")."""
    rope = read.config.get("rope_parameters") or {}
    kind = rope.get("rope_type", "axial") if isinstance(rope, Mapping) else None
    if kind not in ("axial", "default") or rope.get("partial_rotary_factor", 1) != 1:
        raise ConfigError(
            f"vision_config has rope_parameters={rope!r:.80}; possible: the type axial, over whole "
            "heads"
        )
    inner = ConfigReader({**read.config, **rope})
    return inner.number("rope_theta", default=ROPE_THETA)


def activation(xp: Any, name: str) -> Callable[[Any], Any]:
    """By its name in config.json; ConfigError for another."""
    known: dict[str, Callable[[Any], Any]] = {
        "gelu": xp.gelu,
        "gelu_pytorch_tanh": lambda x: xp.gelu(x, approximate="tanh"),
        "quick_gelu": lambda x: x * xp.sigmoid(x * 1.702),
        "silu": xp.silu,
    }
    if name not in known:
        raise ConfigError(
            f"vision_config has hidden_act={name!r:.40}; possible: {', '.join(known)}"
        )
    return known[name]


def linear(build: ModelBuilder, name: str, inputs: int, outputs: int) -> Linear:
    """Never quantized: released checkpoints leave their towers as they are."""
    return build.linear(name, inputs, outputs, bias=True, quantize=False)


class Sequential:
    """Norms, products and activations, one after the other."""

    def __init__(self, *parts: Rows) -> None:
        self._parts = parts

    def __call__(self, x: Tensor) -> Tensor:
        """[n, a] to [n, b]."""
        for part in self._parts:
            x = part(x)
        return x


def products(
    build: ModelBuilder, names: Sequence[str], widths: Sequence[int], between: Rows
) -> Sequential:
    """Two products with something between them. widths: of the rows before, between and after."""
    first, second = names
    return Sequential(
        linear(build, first, widths[0], widths[1]), between, linear(build, second, *widths[1:])
    )


class Layout:
    """How the patches of a call are ordered: window by window, as the layers see them; without
    windows, as they come."""

    def __init__(self, grids: Sequence[Grid], shape: TowerShape) -> None:
        order, places, windows, whole, first = [], [], [], [], 0
        for time, rows, columns in grids:
            tall, wide = rows // shape.merge, columns // shape.merge
            side = shape.window or max(tall, wide)
            for _ in range(time):
                cells = np.arange(tall * wide).reshape(tall, wide)
                for top in range(0, tall, side):
                    for left in range(0, wide, side):
                        window = cells[top : top + side, left : left + side]
                        order.append(window.reshape(-1) + first)
                        windows.append(window.size)
                whole.append(tall * wide)
                first += tall * wide
                places.append(_places(tall, wide, shape.merge))
        per_cell = shape.merge**2
        self.windows = np.array(windows) * per_cell  # patches of each run
        self.whole = np.array(whole) * per_cell
        self.places = np.concatenate(places)  # [patches, 2] row and column
        self._frames = [(rows, columns) for time, rows, columns in grids for _ in range(time)]
        # Which patch of the call comes first, second ... for the layers; and back.
        self.order: tuple[np.ndarray, np.ndarray] | None = None
        if shape.window:
            patches = (np.concatenate(order)[:, None] * per_cell + np.arange(per_cell)).reshape(-1)
            self.order = patches, np.argsort(patches)
            self.places = self.places[patches]

    @property
    def sides(self) -> np.ndarray:
        """[patches, 2]: rows and columns of the frame of each patch."""
        found = np.repeat(np.array(self._frames), self.whole, axis=0)
        return found if self.order is None else found[self.order[0]]


def _places(tall: int, wide: int, merge: int) -> np.ndarray:
    """[tall * wide * merge^2, 2]: row and column of each patch, cell by cell."""
    cells = np.indices((tall, merge, wide, merge))
    rows, columns = cells[0] * merge + cells[1], cells[2] * merge + cells[3]
    both = np.stack((rows, columns), -1).transpose(0, 2, 1, 3, 4)
    return both.reshape(-1, 2)


class LearnedPositions:
    """A square table of vectors, stretched over each frame between neighbours (bilinear).

    `corners`: the outermost patches get the outermost vectors; otherwise patch and vector are areas
    that cover the same frame."""

    def __init__(
        self, build: ModelBuilder, name: str, count: int, hidden: int, *, corners: bool
    ) -> None:
        self._xp, self._to_device, self._corners = build.xp, build.device.to_device, corners
        self._side = int(count**0.5)
        if self._side**2 != count or not count:
            raise ConfigError(
                f"{name} has {count} positions by num_position_embeddings or image_size of "
                "vision_config; expected a square number"
            )
        self._table = _place(build, name, (count, hidden), (count, hidden))

    def __call__(self, layout: Layout) -> Tensor:
        """[patches, hidden], in the layout's order."""
        xp, side = self._xp, self._side
        taps: list[tuple[np.ndarray, np.ndarray]] = []  # by axis: which two, and their weights
        for axis in (0, 1):
            at, length = (x[:, axis].astype(np.float32) for x in (layout.places, layout.sides))
            if self._corners:
                source: np.ndarray = at * (side - 1) / np.maximum(length - 1, 1)
            else:
                source = (at + np.float32(0.5)) * side / length - np.float32(0.5)
            low = np.floor(source)
            both = np.stack((low, low + 1)).astype(np.int64).clip(0, side - 1)
            share = source - low
            taps.append((both, np.stack((1 - share, share)).astype(np.float32)))
        (rows, row_shares), (columns, column_shares) = taps
        total: Any = None
        for tall in (0, 1):
            for wide in (0, 1):
                index = self._to_device(rows[tall] * side + columns[wide])
                share = self._to_device((row_shares[tall] * column_shares[wide])[:, None])
                part = xp.index_select(self._table, 0, index).float() * share
                total = part if total is None else total + part
        return total.to(self._table.dtype)


class Runs:
    """Patches that attend to each other, run after run. lengths: [runs] int64."""

    def __init__(self, lengths: np.ndarray, to_device: Callable[[np.ndarray], Tensor]) -> None:
        self._lengths, self._to_device, self._found = lengths, to_device, list[Any]()
        self.longest = int(lengths.max())
        self.starts = to_device(np.concatenate(([0], np.cumsum(lengths))).astype(np.int32))

    def by_length(self) -> list[Tensor]:
        """For each length that occurs [runs, length] int64: which patches its runs have."""
        starts = np.cumsum(self._lengths) - self._lengths
        for length in () if self._found else np.unique(self._lengths):
            own = starts[self._lengths == length][:, None] + np.arange(length)
            self._found.append(self._to_device(own))
        return self._found


class Block:
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(
        self,
        build: ModelBuilder,
        shape: TowerShape,
        *,
        norms: Sequence[Rows],
        qkv: Rows,
        output: Rows,
        mlp: Rows,
    ) -> None:
        self._xp, self._shape, device = build.xp, shape, build.device
        self._packed = device.attend_packed if isinstance(device, AttendingDevice) else None
        self._rotate = build.kernels["rotary_embedding"]
        self._norms, self._qkv, self._output, self._mlp = norms, qkv, output, mlp

    def __call__(self, x: Tensor, turns: tuple[Tensor, Tensor], runs: Runs) -> Tensor:
        """x: [patches, hidden]; turns: the row of each patch in a rotary table, and the table."""
        x = x + self._output(self._attend(self._qkv(self._norms[0](x)), turns, runs))
        return x + self._mlp(self._norms[1](x))

    def _attend(self, qkv: Tensor, turns: tuple[Tensor, Tensor], runs: Runs) -> Tensor:
        xp, heads, dim = self._xp, self._shape.heads, self._shape.head
        total = int(qkv.shape[0])
        parts = qkv.reshape([total, 3 * heads, dim])
        q, k, v = (parts[:, n * heads : (n + 1) * heads] for n in range(3))
        q, k = self._rotate(q, k, *turns, False)
        if self._packed is not None:
            packed = self._packed(q, k, v, runs.starts, runs.longest)
            if packed is not None:
                return packed.reshape([total, heads * dim])
        result = xp.empty([total, heads * dim], dtype=qkv.dtype, device=qkv.device)
        for index in runs.by_length():
            sizes = int(index.shape[0]), int(index.shape[1])
            flat = index.reshape([-1])

            def pick(x: Tensor, flat: Tensor = flat, sizes: tuple[int, int] = sizes) -> Tensor:
                return xp.index_select(x, 0, flat).reshape([*sizes, heads, dim]).transpose(1, 2)

            attended = _attention(xp, (pick(q), pick(k), pick(v)), dim**-0.5)
            xp.index_copy_(result, 0, flat, attended.transpose(1, 2).reshape([-1, heads * dim]))
        return result


def layer_norm_block(
    build: ModelBuilder, shape: TowerShape, prefix: str, eps: float, mlp: Sequence[str]
) -> Block:
    """A block with layer norms and joined attention weights. mlp: what its products are named."""
    hidden = shape.hidden
    return Block(
        build,
        shape,
        norms=[build.layer_norm(f"{prefix}.norm{n}", hidden, eps) for n in (1, 2)],
        qkv=linear(build, f"{prefix}.attn.qkv", hidden, 3 * hidden),
        output=linear(build, f"{prefix}.attn.proj", hidden, hidden),
        mlp=products(
            build,
            [f"{prefix}.mlp.{name}" for name in mlp],
            (hidden, shape.intermediate, hidden),
            activation(build.xp, shape.activation),
        ),
    )


def _attention(xp: Any, qkv: tuple[Tensor, Tensor, Tensor], scale: float) -> Tensor:
    """q, k, v: [runs, heads, length, dim]; every query sees its whole run. Queries come in parts:
    the logits of a large picture need not be held at once."""
    runs, heads, length, dim = shape = [int(n) for n in qkv[0].shape]
    step = max(1, MAX_SCORES // (runs * heads * length))
    q, k, v = (x.reshape([runs * heads, length, dim]) for x in qkv)
    parts = [
        xp.attend(q[:, at : at + step].unsqueeze(1), k, v, None, scale)
        for at in range(0, length, step)
    ]
    return xp.cat(parts, 2).reshape(shape)


class VisionTower(ABC):
    """A family's tower: from items to vectors. One per rank, made with Tower(build, config)."""

    levels = 0  # DeepStack: parts of a vector that are added after the first layers

    @staticmethod
    @abstractmethod
    def read(config: Mapping[str, Any]) -> TowerShape:
        """The sizes in config.json; ConfigError if it asks for another tower."""

    @abstractmethod
    def __init__(self, build: ModelBuilder, config: Mapping[str, Any]) -> None: ...

    @abstractmethod
    def __call__(self, items: Sequence[MediaItem]) -> Tensor:
        """[sum of num_rows, (1 + levels) * hidden size of the decoder], in the order of the
        items."""


class Trunk:
    """What all towers have: from items to hidden states of their patches.

    `weight`: the checkpoint's name of the patch embedding, a convolution whose step is its size;
    its shape there is `weight_shape`."""

    def __init__(
        self,
        build: ModelBuilder,
        shape: TowerShape,
        blocks: Sequence[Block],
        *,
        weight: str,
        weight_shape: tuple[int, ...],
        bias: str = "",
        positions: LearnedPositions | None = None,
    ) -> None:
        self._xp, self._shape = build.xp, shape
        self._to_device, self._blocks, self._positions = build.device.to_device, blocks, positions
        width = 3 * shape.frames * shape.patch**2
        matrix = (shape.hidden, width)
        is_linear = weight_shape == matrix
        self._patch = _place(build, weight, weight_shape, matrix, is_linear=is_linear)
        self._bias = _place(build, bias, (shape.hidden,), (shape.hidden,)) if bias else None
        exponents = np.arange(0, shape.head // 2, 2, dtype=np.float32) / (shape.head // 2)
        self._frequencies = (1.0 / shape.theta**exponents).astype(np.float32)

    def __call__(self, items: Sequence[MediaItem], after: Sequence[int] = ()) -> list[Tensor]:
        """[patches, hidden] after these layers, and at the end after the last one; in the order
        of the items' patches."""
        xp, shape = self._xp, self._shape
        layout = Layout([item.grid for item in items], shape)
        x = xp.cat([self._embed(item) for item in items])
        order = [self._to_device(index) for index in layout.order or ()]
        x = xp.index_select(x, 0, order[0]) if order else x
        if self._positions is not None:
            x = x + self._positions(layout)
        turns = self._turns(layout.places)
        windows, whole = (
            Runs(lengths, self._to_device) for lengths in (layout.windows, layout.whole)
        )
        found = []
        for number, block in enumerate(self._blocks):
            x = block(x, turns, whole if number in shape.full else windows)
            if number in after:
                found.append(x)
        found.append(x)
        return [xp.index_select(x, 0, order[1]) for x in found] if order else found

    def _turns(self, places: np.ndarray) -> tuple[Tensor, Tensor]:
        """See Block: a row for each patch, of cosines of its row's and column's angles, then sines.
        The host computes them for each number of a row or column, the device picks them."""
        xp, count = self._xp, len(places)
        angles = np.arange(int(places.max()) + 1)[:, None] * self._frequencies
        both = [function(angles.astype(np.float32)) for function in (np.cos, np.sin)]
        table = self._to_device(np.concatenate(both, 1))
        picked = xp.index_select(table, 0, self._to_device(places.reshape(-1)))
        by_axis = picked.reshape([count, 2, 2, len(self._frequencies)])
        return self._to_device(np.arange(count)), by_axis.transpose(1, 2).reshape([count, -1])

    def _embed(self, item: MediaItem) -> Tensor:
        """A still picture stands for all frames of a patch."""
        xp, shape = self._xp, self._shape
        count = int(np.prod(item.grid))
        raw = np.frombuffer(item.data, dtype=np.uint8).reshape(count, 3, -1, shape.patch**2)
        mean, std = np.array(item.numbers[:6], dtype=np.float32).reshape(2, 3)
        pixels = self._to_device(raw).to(xp.float32)
        scale = self._to_device((1 / (255 * std)).reshape(1, 3, 1, 1).astype(np.float32))
        shift = self._to_device((mean / std).reshape(1, 3, 1, 1).astype(np.float32))
        normed = (pixels * scale - shift).to(self._patch.dtype)
        if raw.shape[2] != shape.frames:
            normed = normed.expand([-1, 3, shape.frames, shape.patch**2])
        return xp.linear(normed.reshape([count, -1]), self._patch, self._bias)


def _place(
    build: ModelBuilder,
    name: str,
    stored: tuple[int, ...],
    shape: tuple[int, ...],
    *,
    is_linear: bool = False,
) -> Tensor:
    """A tensor of every rank, in the model's dtype, whose shape in the checkpoint is `stored`.
    is_linear: Paddle's checkpoints have it the other way round."""
    weight = build.zeros(shape, build.xp.dtype(build.dtype))

    def accept(tensor: Tensor) -> None:
        weight[:] = tensor.reshape(list(shape)).to(weight.dtype)

    region = tuple(slice(0, size) for size in stored)
    build.weights.add(Placement(name, stored, region, accept, is_linear=is_linear))
    return weight
