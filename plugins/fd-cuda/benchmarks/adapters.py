"""Products with what adapters add, every cut of native/gemm.cu beside the plain product.

    python plugins/fd-cuda/benchmarks/adapters.py [--keep]

Qwen3-0.6B's products at 64 rows, 8 adapters of rank 16; weights and adapters rotate past the cache.
Each cut is held against float32 first. --keep writes the fastest into this machine's table.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator

import torch

from fd_cuda.kernels import adapted, linear, plans, tune
from fd_cuda.kernels.adapted import Adapters
from fd_cuda.kernels.common import num_processors
from fd_cuda.kernels.plans import Plan, Product

ROWS, SLOTS, RANK, EPS = 64, 8, 16, 1e-6
CASES = {
    "q, k, v": (Product("plain", True, 4096, 1024, "bfloat16"), (2048, 3072, 4096)),
    "output": (Product("add", False, 1024, 2048, "bfloat16"), (1024,)),
    "gate, up": (Product("gated", True, 6144, 1024, "bfloat16"), (3072, 6144)),
    "down": (Product("add", False, 1024, 3072, "bfloat16"), (1024,)),
}


class Case:
    """One product with enough weights that none stays in the cache."""

    def __init__(self, product: Product, ends: tuple[int, ...]) -> None:
        self.product, self.ends = product, ends
        count = max(2, (160 << 20) // (product.width * product.depth * 2) + 1)

        def random(*size: int, spread: float = 1.0) -> torch.Tensor:
            return (torch.randn(*size, device="cuda") * spread).bfloat16()

        width, depth = product.width, product.depth
        self.slots = torch.randint(0, SLOTS, (ROWS,), device="cuda", dtype=torch.int32)
        self.x, self.residual = random(ROWS, depth), random(ROWS, width)
        self.norm = random(depth) + 1 if product.has_norm else None
        self.weights = [random(width, depth, spread=depth**-0.5) for _ in range(count)]
        self.adapters = [
            Adapters(random(SLOTS, len(ends) * RANK, depth, spread=depth**-0.5),
                     random(SLOTS, width, RANK, spread=0.5), ends, self.slots)
            for _ in range(count)
        ]  # fmt: skip

    def compute(self, plan: Plan, nth: int, *, has_adapters: bool) -> torch.Tensor:
        residual = self.residual.clone() if nth < 0 else self.residual
        return linear.compute(
            plan, self.product.epilogue, self.x, self.norm, EPS, self.weights[nth], None,
            residual if self.product.epilogue == "add" else None,
            self.adapters[nth] if has_adapters else None,
        )  # fmt: skip

    def runs(self, plan: Plan, *, has_adapters: bool) -> Callable[[], None]:
        def run() -> None:
            for nth in range(len(self.weights)):
                self.compute(plan, nth, has_adapters=has_adapters)

        return run

    def wanted(self) -> torch.Tensor:
        x, last = self.x.float(), self.adapters[-1]
        if self.norm is not None:
            x = x * torch.rsqrt(x.square().mean(1, keepdim=True) + EPS) * self.norm.float()
        y, begin = x @ self.weights[-1].float().T, 0
        for part, end in enumerate(self.ends):
            a = last.a[:, part * RANK : (part + 1) * RANK][self.slots].float()
            b = last.b[:, begin:end][self.slots].float()
            y[:, begin:end] += torch.einsum("tnr,trk,tk->tn", b, a, x)
            begin = end
        if self.product.epilogue == "gated":
            gate, up = y.chunk(2, 1)
            return torch.nn.functional.silu(gate) * up
        return y + self.residual.float() if self.product.epilogue == "add" else y


def cuts_of(product: Product, shape: adapted.Shape) -> Iterator[Plan]:
    """Tiles, stages and depths that may be fast."""
    is_gated = product.epilogue == "gated"
    for columns in (32, 64, 128):
        tiles = (product.width >> is_gated) // (columns >> is_gated)
        for split in (1, 2, 4, 8):
            if not 0.45 < tiles * split / num_processors() < 2.2:
                continue
            share = -(-product.depth // 64 // split)
            for deep in (2, 4):
                found = (
                    Plan("gemm", 8, 64, columns, stages, split, product.has_norm, deep)
                    for stages in {max(3, share), 4, 6, 8, 12} if stages <= max(3, share)
                )  # fmt: skip
                yield from dict.fromkeys(filter(None, (
                    adapted.fitted(plan, product, ROWS, shape) for plan in found
                )))  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--keep", action="store_true")
    keep = parser.parse_args().keep
    torch.backends.cuda.matmul.allow_tf32 = False
    for name, (product, ends) in CASES.items():
        case, shape = Case(product, ends), adapted.Shape(SLOTS, RANK, ends)
        plain = plans.choose(product.epilogue, product.has_norm, (product.width, product.depth),
                             torch.bfloat16, ROWS)  # fmt: skip
        cuts = list(cuts_of(product, shape))
        runs = {plan: case.runs(plan, has_adapters=True) for plan in cuts}
        tune._compile({plan: functools.partial(case.compute, plan, -1, has_adapters=True)
                       for plan in cuts})  # fmt: skip
        wanted = case.wanted()
        scale = float(wanted.abs().max())
        wrong = {}
        for plan in cuts:
            found = case.compute(plan, -1, has_adapters=True)
            error = float((found.float() - wanted).abs().max()) / scale
            if not error < 1e-2:
                wrong[plan] = error
        count = len(case.weights)
        alone = tune.time_s(case.runs(plain, has_adapters=False), count) * 1e6
        times = {plan: tune.time_s(run, count) * 1e6 for plan, run in runs.items()}
        fastest = sorted(times, key=times.__getitem__)
        case.slots.fill_(-1)
        none = tune.time_s(runs[fastest[0]], count) * 1e6
        print(f"{name}: plain {alone:.2f} us ({plain}); {fastest[0]} with none {none:.2f} us; "
              f"{len(wrong)} of {len(cuts)} wrong {list(wrong.items())[:2]}")  # fmt: skip
        chosen = adapted.fitted(plain, product, ROWS, shape)
        for plan in dict.fromkeys([*fastest[:6], *fastest[-1:], chosen]):
            mark = " <- without a table" if plan == chosen else ""
            print(f"  {times.get(plan, -1):.2f} us {plan}, {plan.deep} deep{mark}")
        if keep:
            key = f"{SLOTS}x{RANK} adapters {product.key}"
            plans._keep(key, {str(ROWS): str(fastest[0])})


if __name__ == "__main__":
    main()
