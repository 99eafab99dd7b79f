"""What fills a table's cell, when it is not used, and the table that layers see."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol

from fastdeploy_core.errors import ConfigError

# What predicates and deny lists of cells may ask about: the device's tensor library, the model's
# dtype, and sizes of config.json, each where the model has it.
KERNEL_SIZES: Final = (
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
)
OBJECTIVES: Final = ("latency", "throughput", "determinism")
KERNEL_FACTS: Final = ("tensor_library", "dtype", "objective", *KERNEL_SIZES)


@dataclass(frozen=True, slots=True)
class Deny:
    """A case for which a cell is not used although it exists, such as one with a wrong result.

    Every condition must hold. `sizes`: smallest and largest value, both included, by a name of
    KERNEL_SIZES; a model without that size is not the case. The next table's cell, and in the end
    the reference's, is used instead, and `fastdeploy plugins why kernels` shows the reason."""

    reason: str
    dtypes: tuple[str, ...] = ()  # of the model; empty: any
    sizes: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        unknown = sorted(set(self.sizes) - set(KERNEL_SIZES))
        if unknown or not self.reason:
            raise ConfigError(
                f"a kernel's deny list names the sizes {', '.join(unknown) or 'none'} and the "
                f"reason {self.reason!r}; possible sizes: {', '.join(KERNEL_SIZES)}; a reason is "
                "needed"
            )

    def matches(self, facts: Mapping[str, Any]) -> bool:
        """Whether this is the case."""
        if self.dtypes and facts.get("dtype") not in self.dtypes:
            return False
        return all(
            name in facts and low <= facts[name] <= high for name, (low, high) in self.sizes.items()
        )


@dataclass(frozen=True, slots=True)
class Kernel:
    """A table cell that says more than its target.

    `predicate` ("module:function", taking a mapping of model facts): the cell is used only where it
    returns True. `prepare` ("module:function", weight -> anything): lays a weight out for this
    very cell, once after loading; the operation is then handed the result in the weight's place.
    With `composes` the target is called once with the finished table and returns the kernel: it
    combines others, whoever they come from.

    Plain weights are prepared for "linear", "gated_linear" or "linear_float32". What "linear" makes
    is also handed to "norm_linear", "linear_add", "linear_logits" and "greedy_linear", and, where
    embedding and head share their weight, to "embedding": a table that prepares "linear" either
    fills these itself or leaves them to the reference's compositions, "embedding" it fills in any
    case. Other weights of "embedding" stay as they are. `formats`, of "linear" and "gated_linear":
    internal formats (quant_formats.py) whose PackedWeights `prepare` takes as well; layers in these
    formats are then computed by the plain operations. `activations`, of a linear_<format> whose
    format leaves them as they are: "int8" rounds x to int8 by absmax / 127, for each token and each
    group of inputs that shares a scale, and so do plain products of that format.

    `behind`, of a linear_<format>: operations that the cell may stand behind ("add_rms_norm",
    "silu_and_mul"), each with a "module:function" that does the operation and what the cell does to
    x first, such as rounding it. It takes the operation's arguments, then the prepared weight, and
    returns what the operation does, but in the normed or activated tensor's place anything that the
    cell takes for x. The product is the same to the last bit.

    `objective`: what the cell is made for, a word of OBJECTIVES. Cells for the objective that was
    asked for (fact "objective") come first, then those without one, then the others (since contract
    1.4)."""

    target: str
    predicate: str = ""
    prepare: str = ""
    composes: bool = False
    formats: tuple[str, ...] = ()
    activations: Literal["", "int8"] = ""
    behind: Mapping[str, str] = field(default_factory=dict)
    denies: tuple[Deny, ...] = ()
    objective: Literal["", "latency", "throughput", "determinism"] = ""


class KernelTable(Protocol):
    """What layers see: operations by name, already chosen."""

    device: str

    def __getitem__(self, operation: str) -> Callable[..., Any]:
        """The kernel for the operation; KeyError names the operations there are."""
        ...

    def __contains__(self, operation: object) -> bool:
        """Whether there is a kernel for the operation."""
        ...

    def prepare(self, operation: str, weight: Any) -> Any:
        """The weight (a tensor or a PackedWeight) as the chosen cell of that operation wants it;
        itself where the cell has no wish. The rows of a plain weight of "gated_linear" are gate
        then up."""
        ...

    def takes(self, operation: str, format_name: str) -> bool:
        """Whether `prepare` of that plain operation takes PackedWeights of the internal format."""
        ...

    def activations(self, operation: str) -> str:
        """Kernel.activations of the chosen cell."""
        ...

    def behind(self, operation: str, before: str) -> Callable[..., Any] | None:
        """Kernel.behind of the chosen cell for the operation before it; None where it has nothing
        for that one."""
        ...

    def origins(self) -> Mapping[str, str]:
        """For the start-up report: operation -> distribution it came from."""
        ...
