"""Operations around decode steps whose state lies on the device.

S slots hold a sequence each; the last one is the padding slot, which stands in for rows that are
missing. B rows, W block numbers of a slot, KD drafts of a slot, Q tokens of a row (Q <= 1 + KD), L
tokens of a history.
"""

from __future__ import annotations

from typing import Annotated, Protocol, TypeAlias

from fastdeploy_core.contracts.signature import Role
from fastdeploy_core.tensor import Tensor

IN_PLACE = Role.IN_PLACE

# (box [R,P,...] int64, turn [1] int64), where the device is a PostingDevice: what is posted in row
# r, column j also becomes box[turn % R, r, j] = turn << 32 | its low 32 bits, written as one
# number.
Post: TypeAlias = tuple[Tensor, Tensor]


class DecodeOperations(Protocol):
    """State of sequences between steps: lengths, newest tokens, drafts, block tables."""

    def prepare_decode(
        self,
        slots: Annotated[Tensor, "B", "int64"],
        tables: Annotated[Tensor, "S W", "int32"],
        num_computed: Annotated[Tensor, "S", "int64"],
        newest: Annotated[Tensor, "S", "int64"],
        drafts: Annotated[Tensor, "S KD", "int64"],
        num_drafts: Annotated[Tensor, "S", "int64"],
        room: Annotated[Tensor, "S", "int64"],
        block_size: int,
        turn: Annotated[Tensor, "1", "int64", IN_PLACE],
        input_ids: Annotated[Tensor, "B*Q", "int64", IN_PLACE],
        positions: Annotated[Tensor, "B*Q", "int64", IN_PLACE],
        slot_mapping: Annotated[Tensor, "B*Q", "int64", IN_PLACE],
        seq_lens: Annotated[Tensor, "B", "int32", IN_PLACE],
        block_tables: Annotated[Tensor, "B W", "int32", IN_PLACE],
        /,
    ) -> None:
        """Adds 1 to turn and fills the last five. Token 0 of a row is its newest one at position
        num_computed, token j its j-th draft at num_computed + j; seq_lens is num_computed + Q.
        Tokens after num_drafts: id 0, slot_mapping -1, the row's first position. Rows of the
        padding slot, and those whose num_computed is not below their room: id 0, slot_mapping -1
        and position 0 for all tokens, seq_lens 0."""
        ...

    def place_tokens(
        self,
        positions: Annotated[Tensor, "B", "int64"],
        room: Annotated[Tensor, "B", "int64"],
        block_tables: Annotated[Tensor, "B W", "int32"],
        block_size: int,
        /,
    ) -> tuple[
        Annotated[Tensor, "B", "int64"],
        Annotated[Tensor, "B", "int64"],
        Annotated[Tensor, "B", "int32"],
    ]:
        """(positions, slot_mapping, seq_lens) of a step with one token of each row at these
        positions. Rows whose position is not below their room: position 0, slot_mapping -1,
        seq_lens 0."""
        ...

    def keep_drafts(
        self,
        slots: Annotated[Tensor, "B", "int64"],
        proposals: Annotated[Tensor, "B N", "int64"],
        results: Annotated[Tensor, "B M", "int64"],
        limit: Annotated[Tensor, "1", "int64"],
        vocab_size: int,
        num_computed: Annotated[Tensor, "S", "int64"],
        room: Annotated[Tensor, "S", "int64"],
        drafts: Annotated[Tensor, "S KD", "int64", IN_PLACE],
        num_drafts: Annotated[Tensor, "S", "int64", IN_PLACE],
        post: Post | None,
        /,
    ) -> Annotated[Tensor, "B M+N", "int64"]:
        """N <= KD. Each row's proposals up to the first outside 0 to vocab_size - 1 become its
        drafts, at most limit of them and room - 1 - num_computed. Returned are the results as they
        are, beside them what was taken and after that -1, or -2 for what is neither a token nor -1:
        these N are posted. The padding slot gets none; M may be 0."""
        ...

    def finish_decode(
        self,
        slots: Annotated[Tensor, "B", "int64"],
        drawn: Annotated[Tensor, "B*Q", "int64"],
        marked: Annotated[Tensor, "B*Q", "int64"],
        peaks: Annotated[Tensor, "B*Q", "float32"] | None,
        drafts: Annotated[Tensor, "S KD", "int64"],
        num_drafts: Annotated[Tensor, "S", "int64"],
        num_computed: Annotated[Tensor, "S", "int64", IN_PLACE],
        newest: Annotated[Tensor, "S", "int64", IN_PLACE],
        results: Annotated[Tensor, "B Q", "int64", IN_PLACE],
        post: Post | None,
        /,
    ) -> Annotated[Tensor, "B", "int64"]:
        """marked: see mark_broken; where peaks is not finite, it counts as -2. With a, how many
        leading drafts of the row, of num_drafts and at most Q - 1, are what was sampled in their
        place, before one after which marked is negative: newest becomes drawn token a of the row,
        num_computed grows by 1 + a, results are the row's marked tokens up to a, then -1; these are
        posted, after them how many drafts were judged, and a. Returned is where in drawn each row's
        token a stands. The padding slot stays as it is."""
        ...

    def keep_results(
        self,
        slots: Annotated[Tensor, "B", "int64"],
        results: Annotated[Tensor, "B 1", "int64"],
        num_computed: Annotated[Tensor, "S", "int64"],
        kept: Annotated[Tensor, "B N", "int64", IN_PLACE],
        /,
    ) -> None:
        """Results and num_computed as finish_decode left them: each row's result stands in column
        num_computed % N. Rows of the padding slot stay as they are."""
        ...


class HistoryOperations(Protocol):
    """Tokens of S sequences, of which L fit."""

    def append_history(
        self,
        slots: Annotated[Tensor, "B", "int64"],
        results: Annotated[Tensor, "B Q", "int64"],
        num_computed: Annotated[Tensor, "S", "int64"],
        history: Annotated[Tensor, "S L", "int32", IN_PLACE],
        /,
    ) -> None:
        """Results and num_computed as finish_decode left them: the row's leading results that are
        not negative stand up to position num_computed. Only the padding slot's row may hold
        anything else."""
        ...

    def match_ngrams(
        self,
        history: Annotated[Tensor, "S L", "int32"],
        slots: Annotated[Tensor, "B", "int64"],
        num_known: Annotated[Tensor, "B", "int64"],
        min_size: int,
        max_size: int,
        n: int,
        /,
    ) -> Annotated[Tensor, "B n", "int64"]:
        """n tokens: what followed the last tokens of the first num_known where the longest
        end of them, of min_size to max_size tokens, stood before, at the latest such place; after
        the newest token it goes on with itself. -1 where there is none."""
        ...
