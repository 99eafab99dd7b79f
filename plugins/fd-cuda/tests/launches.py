"""Which kernels every_kernel.py has launched, and in what form."""

from __future__ import annotations

import functools
import re
from collections import Counter
from pathlib import Path
from typing import Any

from fd_cuda.kernels import native


def count_launches() -> Counter[str]:
    """From now on every launch is counted by the kernel's name."""
    from triton.runtime.jit import JITFunction

    counts: Counter[str] = Counter()
    run, launch = JITFunction.run, native.launch

    def counted(self: Any, *arguments: Any, **options: Any) -> Any:
        counts[f"{self.__module__.removeprefix('fd_cuda.')}.{self.__name__}"] += 1
        return run(self, *arguments, **options)

    def counted_native(kernel: Any, *arguments: Any, **options: Any) -> None:
        counts["native"] += 1
        launch(kernel, *arguments, **options)

    JITFunction.run = counted
    native.launch = counted_native
    return counts


def never_launched(counts: Counter[str]) -> list[str]:
    """Kernels that a module of this plugin launches and nothing here has, by name."""
    package = Path(native.__file__).parents[2]
    wanted = {path.stem for path in Path(native.__file__).parent.glob("*.cu")}
    for path in package.rglob("*.py"):
        wanted |= set(
            re.findall(r"^ +(?:return )?(\w+)\[\(", path.read_text("utf-8"), re.MULTILINE)
        )
    launched = {name.rpartition(".")[2] for name in counts} | {key[1] for key in native._functions}
    return sorted(wanted - launched)


def copy_plainly() -> None:
    """Copies to shared memory that run beside the kernel (copies.cuh, wide.cuh) become loads and
    stores. racecheck reports the former against what other blocks of a cluster store there later,
    and against reads after a barrier at which their end arrives; it knows how barriers order the
    latter."""
    plain = {
        "copies.cuh": (
            r'asm volatile\("cp\.async\.cg.*?\);',
            "*(uint4*)__cvta_shared_to_generic(to) = inside ? *(const uint4*)from : make_uint4(0, "
            "0, 0, 0);",
        ),
        "wide.cuh": (
            r'asm volatile\("cp\.async\.ca.*?\);',
            "*(u32*)__cvta_shared_to_generic(to) = inside ? *(const u32*)from : 0;",
        ),
        "feed.cuh": (
            r'asm volatile\("cp\.async\.mbarrier.*?\);',
            "arrive_at(barrier);",
        ),
    }
    text = native.source_of.__wrapped__

    def source(name: str) -> str:
        found = text(name)
        if name in plain:
            found, count = re.subn(*plain[name], found, flags=re.DOTALL)
            assert count == 1
        return found

    native.source_of = functools.cache(source)
