"""Loads the layers that a drafter adds to the target, from the target's checkpoint or its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastdeploy_core import envs
from fastdeploy_core.config import EngineConfig
from fastdeploy_core.config.model import checkpoint_layout, read_json
from fastdeploy_core.contracts.model import StoredTensor
from fastdeploy_core.errors import WeightError

from .loader import Checkpoint, open_files, some_names
from .weights import dummy_tensors

if TYPE_CHECKING:
    from fastdeploy_core.layers import ModelBuilder

Named = tuple[str, StoredTensor]


def load_draft_weights(
    build: ModelBuilder, model: Any, config: EngineConfig, folder: str, prefixes: Sequence[str]
) -> None:
    """Load the layers made with `build` from tensors whose names begin with one of `prefixes`.

    They come from the checkpoint in `folder`; without one, from what the target's checkpoint kept
    for drafters (`model.mtp_weights`). WeightError names what is missing or unknown.
    """
    weights = build.weights
    with ExitStack() as stack, build.xp.no_grad():
        tensors: Iterable[Named]
        if config.model.load_format == "dummy":
            needed = {n: p for n, p in weights.placements.items() if p.required}
            tensors, source = dummy_tensors(needed, config.model.seed, build.device), "random"
        elif folder:
            path = Path(folder)
            stated = path / "config.json"
            hf_config = read_json(stated) if stated.is_file() else config.model.hf_config
            layout = checkpoint_layout(hf_config, force_torch=envs.FD_FOR_TORCH_MODEL_FORMAT)
            weights.swap_linear = layout == "paddle"
            tensors = stack.enter_context(Checkpoint(open_files(path, build.device), build.tp_rank))
            source = f"the draft checkpoint in {folder}"
        else:
            weights.swap_linear = model.weights.swap_linear
            tensors = model.mtp_weights.items()
            source = f"the checkpoint in {config.model.path}"
        named = (t for t in tensors if weights.canonical(t[0]).startswith(tuple(prefixes)))
        unknown = weights.load(named)
    if unknown:
        raise WeightError(
            f"{source} has {len(unknown)} draft weights that this speculative method does not "
            f"know: {some_names(unknown)}; they do not belong to the target's config.json"
        )
    missing = weights.missing()
    if missing:
        raise WeightError(
            f"{source} lacks {len(missing)} weights that the speculative method needs: "
            f"{some_names(missing)}; possible: a checkpoint published with them, their folder as "
            "'model' in --speculative-config, or a method without weights such as ngram"
        )
