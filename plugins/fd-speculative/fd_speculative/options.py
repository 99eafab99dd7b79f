"""A method's own keys of --speculative-config, read into a record; wrong ones are refused.

The hook at start-up uses it to collect problems, the driver to get the record.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from fastdeploy_core.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    class Record(DataclassInstance, Protocol):
        """A dataclass of options, all with defaults."""

        def problems(self) -> list[str]:
            """What is wrong with the values, in words."""
            ...


Options = TypeVar("Options", bound="Record")


@dataclass(frozen=True, slots=True)
class NgramOptions:
    """Options of `ngram_match`."""

    max_ngram_size: int = 5
    min_ngram_size: int = 2

    def problems(self) -> list[str]:
        """What is wrong with the values, in words."""
        found = []
        if not 1 <= self.max_ngram_size <= 32:
            found.append(f"max_ngram_size must be between 1 and 32, got {self.max_ngram_size}")
        if not 1 <= self.min_ngram_size <= self.max_ngram_size:
            found.append(
                f"min_ngram_size must be between 1 and max_ngram_size ({self.max_ngram_size}), "
                f"got {self.min_ngram_size}"
            )
        return found


@dataclass(frozen=True, slots=True)
class SuffixOptions:
    """Options of `suffix`. The first four are FastDeploy's and vLLM's suffix_decoding_*."""

    max_depth: int = 64  # longest match to search for
    max_cached_requests: int = -1  # past outputs remembered; -1: as many as max_cached_tokens allow
    max_spec_factor: float = 1.0  # drafts per matched token
    min_token_prob: float = 0.1  # drafts less probable than this are left out
    max_cached_tokens: int = 100_000  # of past outputs

    def problems(self) -> list[str]:
        """What is wrong with the values, in words."""
        found = []
        if not 1 <= self.max_depth <= 1024:
            found.append(f"max_depth must be between 1 and 1024, got {self.max_depth}")
        if self.max_cached_requests < -1:
            found.append(f"max_cached_requests must be -1 or more, got {self.max_cached_requests}")
        if not 0 < self.max_spec_factor <= 64:
            found.append(
                f"max_spec_factor must be above 0 and at most 64, got {self.max_spec_factor:g}"
            )
        if not 0 <= self.min_token_prob <= 1:
            found.append(f"min_token_prob must be between 0 and 1, got {self.min_token_prob:g}")
        if not 0 <= self.max_cached_tokens <= 100_000_000:
            found.append(
                f"max_cached_tokens must be between 0 and 100000000, got {self.max_cached_tokens}"
            )
        return found


@dataclass(frozen=True, slots=True)
class DraftModelOptions:
    """Options of `draft_model`."""

    model: str = ""  # folder of the draft model
    quantization: str = ""  # of the draft model; empty: as its config.json says

    def problems(self) -> list[str]:
        """What is wrong with the values, in words."""
        return [] if self.model else ["it needs model, the folder of a draft model"]


def read_options(record: type[Options], given: Mapping[str, Any]) -> Options:
    """The record; ConfigError names every key that cannot be obeyed."""
    problems, options = check_options(record, given)
    if options is None:
        raise ConfigError(f"--speculative-config cannot be obeyed: {'; '.join(problems)}")
    return options


def check_options(
    record: type[Options], given: Mapping[str, Any]
) -> tuple[list[str], Options | None]:
    """(problems in words, the record or None where there are problems)."""
    fields = {f.name: f for f in dataclasses.fields(record)}
    problems, values = [], {}
    for key, value in given.items():
        if key not in fields:
            near = difflib.get_close_matches(key, fields, n=1)
            hint = f"did you mean {near[0]}?" if near else f"possible: {', '.join(fields)}"
            problems.append(f"it has no option {key}; {hint}")
            continue
        if value is None:
            continue
        wanted = type(fields[key].default)
        if wanted is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):
            problems.append(f"{key} must be of type {wanted.__name__}, got {value!r:.60}")
            continue
        values[key] = value
    if problems:
        return problems, None
    options = record(**values)
    problems = options.problems()
    return problems, None if problems else options
