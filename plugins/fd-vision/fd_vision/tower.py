"""Qwen2.5-VL's vision tower over the core's layers: patches to vectors for the decoder.

Every rank holds all of it. Patches attend to those of the same picture, in most layers of the
same window. Attention is computed for all runs of one length together; lengths come from the
grids, which the host knows, so nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fastdeploy_core.errors import ConfigError
from fastdeploy_core.layers import Placement

if TYPE_CHECKING:
    from fastdeploy_core.layers import Linear, ModelBuilder, RMSNorm
    from fastdeploy_core.tensor import Tensor
    from fastdeploy_core.types import MediaItem

ROPE_THETA = 10000.0
EPS = 1e-6
MAX_SCORES = 2**26  # attention logits held at a time
Grid = tuple[int, int, int]


class VisionShape:
    """The sizes in vision_config; ConfigError for what this tower is not."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        vision = config.get("vision_config") or {}

        def size(name: str, default: int | None = None) -> int:
            value = vision.get(name, default)
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"vision_config has {name}={value!r}; expected a number above 0")
            return value

        self.depth, self.hidden = size("depth"), size("hidden_size")
        self.heads, self.intermediate = size("num_heads"), size("intermediate_size")
        self.patch, self.merge = size("patch_size"), size("spatial_merge_size")
        self.frames = size("temporal_patch_size", 2)
        self.out = size("out_hidden_size", config.get("hidden_size"))
        self.window = size("window_size", 112) // self.patch // self.merge  # in merged cells
        self.full = frozenset(vision.get("fullatt_block_indexes") or ())
        self.head = self.hidden // self.heads
        if vision.get("in_channels", vision.get("in_chans", 3)) != 3:
            raise ConfigError("vision_config asks for other channels than 3")
        if vision.get("hidden_act", "silu") != "silu":
            raise ConfigError(
                f"vision_config has hidden_act={vision['hidden_act']!r}; possible: silu"
            )
        if self.hidden % self.heads or self.head % 4 or self.window < 1:
            raise ConfigError(
                f"vision_config has {self.heads} heads of {self.hidden} and windows of "
                f"{self.window} cells; a head's size has to be a multiple of 4"
            )


class Layout:
    """How the patches of a call are ordered: window by window, as the layers see them."""

    def __init__(self, grids: Sequence[Grid], shape: VisionShape) -> None:
        order, angles, windows, whole, first = [], [], [], [], 0
        for time, rows, columns in grids:
            tall, wide = rows // shape.merge, columns // shape.merge
            for _ in range(time):
                cells = np.arange(tall * wide).reshape(tall, wide)
                for top in range(0, tall, shape.window):
                    for left in range(0, wide, shape.window):
                        window = cells[top : top + shape.window, left : left + shape.window]
                        order.append(window.reshape(-1) + first)
                        windows.append(window.size)
                whole.append(tall * wide)
                first += tall * wide
                angles.append(_places(tall, wide, shape.merge))
        self.order = np.concatenate(order)  # of merged cells
        self.back = np.argsort(self.order)
        per_cell = np.arange(shape.merge**2)
        self.patches = (self.order[:, None] * shape.merge**2 + per_cell).reshape(-1)
        self.places = np.concatenate(angles)[self.patches]  # [patches, 2] row and column
        self.windows = np.array(windows) * shape.merge**2  # patches of each run
        self.whole = np.array(whole) * shape.merge**2


def _places(tall: int, wide: int, merge: int) -> np.ndarray:
    """[tall * wide * merge^2, 2]: row and column of each patch, cell by cell."""
    cells = np.indices((tall, merge, wide, merge))
    rows, columns = cells[0] * merge + cells[1], cells[2] * merge + cells[3]
    both = np.stack((rows, columns), -1).transpose(0, 2, 1, 3, 4)
    return both.reshape(-1, 2)


class Block:
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, build: ModelBuilder, prefix: str, shape: VisionShape) -> None:
        self._xp, self._shape = build.xp, shape
        hidden, wide = shape.hidden, shape.intermediate
        self._norms: list[RMSNorm] = [build.norm(f"{prefix}.norm{n}", hidden, EPS) for n in (1, 2)]
        self._qkv = _linear(build, f"{prefix}.attn.qkv", hidden, 3 * hidden)
        self._output = _linear(build, f"{prefix}.attn.proj", hidden, hidden)
        self._gate, self._up = (
            _linear(build, f"{prefix}.mlp.{name}_proj", hidden, wide) for name in ("gate", "up")
        )
        self._down = _linear(build, f"{prefix}.mlp.down_proj", wide, hidden)

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, runs: list[Tensor]) -> Tensor:
        """x: [patches, hidden]; cos, sin: [patches, 1, head / 2] float32; runs: see _runs."""
        x = x + self._output(self._attend(self._qkv(self._norms[0](x)), cos, sin, runs))
        normed = self._norms[1](x)
        return x + self._down(self._xp.silu(self._gate(normed)) * self._up(normed))

    def _attend(self, qkv: Tensor, cos: Tensor, sin: Tensor, runs: list[Tensor]) -> Tensor:
        xp, heads, dim = self._xp, self._shape.heads, self._shape.head
        total = int(qkv.shape[0])
        parts = qkv.reshape([total, 3 * heads, dim])
        turned = xp.rotate(parts[:, : 2 * heads], cos, sin, False)
        q, k, v = turned[:, :heads], turned[:, heads:], parts[:, 2 * heads :]
        result = xp.empty([total, heads * dim], dtype=qkv.dtype, device=qkv.device)
        for index in runs:
            sizes = int(index.shape[0]), int(index.shape[1])
            flat = index.reshape([-1])

            def pick(x: Tensor, flat: Tensor = flat, sizes: tuple[int, int] = sizes) -> Tensor:
                return xp.index_select(x, 0, flat).reshape([*sizes, heads, dim]).transpose(1, 2)

            own = pick(q).float(), pick(k).float(), pick(v).float()
            attended = _attention(xp, own, dim**-0.5).to(qkv.dtype)
            xp.index_copy_(result, 0, flat, attended.transpose(1, 2).reshape([-1, heads * dim]))
        return result


def _attention(xp: Any, qkv: tuple[Tensor, Tensor, Tensor], scale: float) -> Tensor:
    """q, k, v: [runs, heads, length, dim] float32; every query sees its whole run. Queries come in
    parts, so that the logits of a large picture need not be held at once."""
    q, k, v = qkv
    runs, heads, length, _ = (int(n) for n in q.shape)
    step = max(1, MAX_SCORES // (runs * heads * length))
    keys = k.transpose(2, 3).contiguous()
    parts = [
        xp.matmul(xp.softmax(xp.matmul(q[:, :, at : at + step] * scale, keys), -1), v)
        for at in range(0, length, step)
    ]
    return parts[0] if len(parts) == 1 else xp.cat(parts, 2)


class VisionTower:
    """One per rank."""

    def __init__(self, build: ModelBuilder, prefix: str, shape: VisionShape) -> None:
        self._build, self._xp, self._shape = build, build.xp, shape
        self._to_device = build.device.to_device
        self._patch = self._place_patch(f"{prefix}.patch_embed.proj.weight")
        self._blocks = [Block(build, f"{prefix}.blocks.{n}", shape) for n in range(shape.depth)]
        self._norm = build.norm(f"{prefix}.merger.ln_q", shape.hidden, EPS)
        cell = shape.hidden * shape.merge**2
        self._first = _linear(build, f"{prefix}.merger.mlp.0", cell, cell)
        self._second = _linear(build, f"{prefix}.merger.mlp.2", cell, shape.out)
        exponents = np.arange(0, shape.head // 2, 2, dtype=np.float32) / (shape.head // 2)
        self._frequencies = (1.0 / ROPE_THETA**exponents).astype(np.float32)

    def _place_patch(self, name: str) -> Tensor:
        """[hidden, 3 * frames * patch * patch]: a convolution whose step is its size."""
        build, shape = self._build, self._shape
        sizes = (shape.hidden, 3, shape.frames, shape.patch, shape.patch)
        weight = build.zeros((shape.hidden, int(np.prod(sizes[1:]))), build.xp.dtype(build.dtype))

        def accept(tensor: Tensor) -> None:
            weight[:] = tensor.reshape([shape.hidden, -1]).to(weight.dtype)

        region = tuple(slice(0, size) for size in sizes)
        build.weights.add(Placement(name, sizes, region, accept))
        return weight

    def __call__(self, items: Sequence[MediaItem]) -> Tensor:
        """[sum of num_rows, out], in the order of the items."""
        xp, shape = self._xp, self._shape
        layout = Layout([item.grid for item in items], shape)
        x = xp.cat([self._embed(item) for item in items])
        x = xp.index_select(x, 0, self._to_device(layout.patches))
        angles = (layout.places[:, :, None] * self._frequencies).reshape(len(layout.places), 1, -1)
        cos, sin = (
            self._to_device(function(angles.astype(np.float32))) for function in (np.cos, np.sin)
        )
        windows, whole = (
            [self._to_device(index) for index in _runs(lengths)]
            for lengths in (layout.windows, layout.whole)
        )
        for number, block in enumerate(self._blocks):
            x = block(x, cos, sin, whole if number in shape.full else windows)
        cells = self._norm(x).reshape([-1, shape.hidden * shape.merge**2])
        merged = self._second(xp.gelu(self._first(cells)))
        return xp.index_select(merged, 0, self._to_device(layout.back))

    def _embed(self, item: MediaItem) -> Tensor:
        """A still picture stands for all frames of the temporal patch."""
        xp, shape = self._xp, self._shape
        raw = np.frombuffer(item.data, dtype=np.uint8).reshape(-1, 3, 1, shape.patch**2)
        mean, std = np.array(item.numbers, dtype=np.float32).reshape(2, 3)
        pixels = self._to_device(raw).to(xp.float32)
        scale = self._to_device((1 / (255 * std)).reshape(1, 3, 1, 1).astype(np.float32))
        shift = self._to_device((mean / std).reshape(1, 3, 1, 1).astype(np.float32))
        normed = (pixels * scale - shift).to(self._patch.dtype)
        repeated = normed.expand([-1, 3, shape.frames, shape.patch**2])
        return xp.linear(repeated.reshape([raw.shape[0], -1]), self._patch)


def _runs(lengths: np.ndarray) -> list[np.ndarray]:
    """For each length that occurs [runs, length] int64: which patches its runs have."""
    starts = np.cumsum(lengths) - lengths
    return [starts[lengths == length][:, None] + np.arange(length) for length in np.unique(lengths)]


def _linear(build: ModelBuilder, name: str, inputs: int, outputs: int) -> Linear:
    """Never quantized: released checkpoints leave their towers as they are."""
    return build.linear(name, inputs, outputs, bias=True, quantize=False)
