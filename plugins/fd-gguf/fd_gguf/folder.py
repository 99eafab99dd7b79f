"""The tokenizer of a GGUF file as a folder of JSON files, which the other parts read.

Made once per file header and kept in a folder named by the header's digest: tokenizer.json,
tokenizer_config.json and generation_config.json.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import tempfile
from pathlib import Path
from typing import Any, Final

from fastdeploy_core.errors import ConfigError

from .reader import GGUFModel
from .settings import generation_config
from .tokenizer import tokenizer_files

logger = logging.getLogger(__name__)

_LAYOUT: Final = "1"  # changes whenever other files are made from the same header


def tokenizer_folder(model: GGUFModel, root: Path) -> Path:
    """The folder below `root` with the model's tokenizer; made if it does not exist."""
    digest = hashlib.sha256(_LAYOUT.encode() + model.files[0].header()).hexdigest()
    folder = root / digest[:32]
    if folder.is_dir():
        return folder
    files: dict[str, Any] = {
        **tokenizer_files(model),
        "generation_config.json": generation_config(model),
    }
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=".making-", dir=root))
        try:
            for name, value in files.items():
                text = json.dumps(value, ensure_ascii=False)
                (made / name).write_text(text, encoding="utf-8")
            made.replace(folder)
        except OSError:
            shutil.rmtree(made, ignore_errors=True)
            if not folder.is_dir():  # no other process made it meanwhile
                raise
    except OSError as error:
        raise ConfigError(
            f"the tokenizer of {model.path} cannot be unpacked into {root}: {error}; set "
            "FD_CACHE_DIR to a folder that can be written, or pass --tokenizer DIR"
        ) from None
    logger.info("tokenizer of %s unpacked into %s", model.path, folder)
    return folder
