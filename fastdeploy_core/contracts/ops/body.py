"""Operations of a model's body, and fused ones, which the reference composes of others."""

from __future__ import annotations

from typing import Annotated, Protocol

from fastdeploy_core.contracts.signature import Role
from fastdeploy_core.tensor import Tensor

PREPARED, SCRATCH = Role.PREPARED, Role.SCRATCH


class BodyOperations(Protocol):
    """T tokens, H hidden, I intermediate, V vocabulary, K inputs, N outputs, D of a head."""

    def embedding(
        self, input_ids: Annotated[Tensor, "T", "int64"], weight: Annotated[Tensor, "V H"], /
    ) -> Annotated[Tensor, "T H"]:
        """Row input_ids[i] of the weight as row i; prepared where embedding and head share it."""
        ...

    def linear(
        self,
        x: Annotated[Tensor, "T K"],
        weight: Annotated[Tensor, "N K", PREPARED],
        bias: Annotated[Tensor, "N"] | None,
        /,
    ) -> Annotated[Tensor, "T N"]:
        """x times the weight transposed, plus the bias."""
        ...

    def rms_norm(
        self, x: Annotated[Tensor, "... H"], weight: Annotated[Tensor, "H"], eps: float, /
    ) -> Annotated[Tensor, "... H"]:
        """x over the root of the mean of its squares plus eps, times the weight; in float32."""
        ...

    def add_rms_norm(
        self,
        x: Annotated[Tensor, "T H"],
        residual: Annotated[Tensor, "T H"],
        weight: Annotated[Tensor, "H"],
        eps: float,
        /,
    ) -> tuple[Annotated[Tensor, "T H"], Annotated[Tensor, "T H"]]:
        """(rms_norm of the sum, x + residual)."""
        ...

    def silu_and_mul(self, x: Annotated[Tensor, "T 2*I"], /) -> Annotated[Tensor, "T I"]:
        """silu(gate) * up, of rows that hold gate, then up."""
        ...

    def select_rows(
        self, x: Annotated[Tensor, "T H"], index: Annotated[Tensor, "M", "int64"], /
    ) -> Annotated[Tensor, "M H"]:
        """Row i is row index[i] of x. The index begins with one or more numbers that grow strictly;
        zeros after them are padding, and what stands in their rows is left open."""
        ...

    def rotary_embedding(
        self,
        q: Annotated[Tensor, "T Hq D"],
        k: Annotated[Tensor, "T Hk D"],
        positions: Annotated[Tensor, "T", "int64"],
        cos_sin: Annotated[Tensor, "P R", "float32"],
        interleaved: bool,
        /,
    ) -> tuple[Annotated[Tensor, "T Hq D"], Annotated[Tensor, "T Hk D"]]:
        """(q, k) with their first R dimensions rotated; a row of cos_sin holds R/2 cosines, then
        R/2 sines. Interleaved: pairs are neighbours, else dimension i turns with i + R/2."""
        ...


class FusedOperations(Protocol):
    """Several operations in one kernel; a device that lacks one gets the composition."""

    def norm_linear(
        self,
        x: Annotated[Tensor, "T K"],
        norm_weight: Annotated[Tensor, "K"],
        eps: float,
        weight: Annotated[Tensor, "N K", PREPARED],
        bias: Annotated[Tensor, "N"] | None,
        /,
    ) -> Annotated[Tensor, "T N"]:
        """linear of rms_norm(x)."""
        ...

    def gated_linear(
        self,
        x: Annotated[Tensor, "T K"],
        norm_weight: Annotated[Tensor, "K"] | None,
        eps: float,
        weight: Annotated[Tensor, "2*I K", PREPARED],
        bias: Annotated[Tensor, "2*I"] | None,
        /,
    ) -> Annotated[Tensor, "T I"]:
        """silu_and_mul of linear of rms_norm(x); without norm_weight of x as it is. Rows of the
        weight are gate, then up."""
        ...

    def linear_add(
        self,
        x: Annotated[Tensor, "T K"],
        weight: Annotated[Tensor, "N K", PREPARED],
        bias: Annotated[Tensor, "N"] | None,
        residual: Annotated[Tensor, "T N", SCRATCH],
        /,
    ) -> Annotated[Tensor, "T N"]:
        """residual + linear(x)."""
        ...

    def qk_norm(
        self,
        q: Annotated[Tensor, "T Hq D", SCRATCH],
        k: Annotated[Tensor, "T Hk D", SCRATCH],
        q_weight: Annotated[Tensor, "D"],
        k_weight: Annotated[Tensor, "D"],
        eps: float,
        /,
    ) -> tuple[Annotated[Tensor, "T Hq D"], Annotated[Tensor, "T Hk D"]]:
        """(q, k), rms_norm of each head; q and k may be slices of one tensor."""
        ...

    def concat_rms_norm(
        self,
        x: Annotated[Tensor, "T H"],
        x_weight: Annotated[Tensor, "H"],
        y: Annotated[Tensor, "T H"],
        y_weight: Annotated[Tensor, "H"],
        eps: float,
        /,
    ) -> Annotated[Tensor, "T 2*H"]:
        """rms_norm of x, beside it rms_norm of y."""
        ...

    def linear_float32(
        self,
        x: Annotated[Tensor, "T K"],
        weight: Annotated[Tensor, "N K", PREPARED],
        /,
    ) -> Annotated[Tensor, "T N", "float32"]:
        """linear, in float32; the weight is float32 before it is prepared."""
        ...

    def linear_logits(
        self,
        x: Annotated[Tensor, "T K"],
        weight: Annotated[Tensor, "V K", PREPARED],
        bias: Annotated[Tensor, "V"] | None,
        /,
    ) -> Annotated[Tensor, "T V", "float32"]:
        """linear, not rounded to x's dtype where the kernel can help it."""
        ...

    def greedy_linear(
        self,
        x: Annotated[Tensor, "T K"],
        weight: Annotated[Tensor, "V K", PREPARED],
        bias: Annotated[Tensor, "V"] | None,
        /,
    ) -> tuple[Annotated[Tensor, "T", "int64"], Annotated[Tensor, "T", "float32"]]:
        """(greedy of the float32 logits linear(x), the logits that it chose)."""
        ...
