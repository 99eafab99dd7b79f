"""Model folders for tests of the offline API: tokenizer, chat template, config.json; no weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests import tokenizer_files

VOCAB_SIZE = 420  # a little more than the tokenizer has
TEMPLATE = (
    "{{ bos_token }}"
    + tokenizer_files.CHAT_TEMPLATE
    + "{% if tools %}{{ tools | tojson }}{% endif %}"
)


def write_model(folder: Path, *, faults: tuple[dict[str, Any], ...] = (), **config: Any) -> Path:
    """A tiny ERNIE 4.5 folder; device null runs it as the fake model of testing.fakes."""
    # The tokenizer writes <s> before every text, so that a doubled one would be seen.
    tokenizer_files.write(folder, "byte_level_with_bos", {"chat_template": TEMPLATE})
    settings = {
        "architectures": ["Ernie4_5ForCausalLM"],
        "model_type": "ernie4_5",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "use_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": "float32",
        "null": {"vocab_size": VOCAB_SIZE},
        "faults": list(faults),
        **config,
    }
    (folder / "config.json").write_text(json.dumps(settings))
    return folder
