"""tokenizer.json out of a SentencePiece model (tokenizer.model), which older folders have alone.

The result tokenizes as the SentencePiece library does; text after a special token begins a word.
Which tokens stand around a text is not in the model: tokenizer_config.json says it (add_bos_token,
add_eos_token), or the token for the beginning is added.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fastdeploy_core.errors import ConfigError

SPACE = "\u2581"  # stands for a space in pieces
UNIGRAM, BPE = 1, 2
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


def convert(folder: Path) -> Path:
    """Write tokenizer.json beside tokenizer.model; ConfigError for what cannot be converted."""
    import tokenizers
    from tokenizers import decoders, normalizers, pre_tokenizers

    source, target = folder / "tokenizer.model", folder / "tokenizer.json"
    if target.exists():
        raise ConfigError(f"{target} exists already; remove it first to have it made again")
    model = _read(source)
    rules = model.normalizer_spec
    own = [piece.piece for piece in model.pieces if piece.type == USER_DEFINED]
    if own and rules.add_dummy_prefix:
        raise ConfigError(
            f"{source} puts a space before each text (add_dummy_prefix) and has symbols of its own "
            f"({', '.join(own[:3])}), after which tokenizer.json cannot leave it out; possible: a "
            "model without one of both, or a tokenizer.json from the model's author"
        )
    made = tokenizers.Tokenizer(_model(model, source))
    steps: list[Any] = []
    if rules.precompiled_charsmap:
        steps.append(normalizers.Precompiled(rules.precompiled_charsmap))
    if rules.remove_extra_whitespaces:
        steps += [normalizers.Strip(), normalizers.Replace(tokenizers.Regex(" {2,}"), " ")]
    if rules.add_dummy_prefix:
        steps.append(normalizers.Prepend(SPACE))
    made.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    if model.trainer_spec.model_type == UNIGRAM:
        # Pieces do not go over the beginning of a word, which keeps long texts quick.
        made.pre_tokenizer = pre_tokenizers.Split(SPACE, "merged_with_next")
    back: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if rules.add_dummy_prefix:
        back.append(decoders.Strip(" ", 1, 0))
    made.decoder = decoders.Sequence(back)
    for piece in model.pieces:
        is_special = piece.type in (CONTROL, UNKNOWN)
        if is_special or piece.type == USER_DEFINED:
            token = tokenizers.AddedToken(piece.piece, special=is_special, normalized=False)
            (made.add_special_tokens if is_special else made.add_tokens)([token])
    _add_ends(made, model, folder)
    made.save(str(target))
    return target


def _read(source: Path) -> Any:
    try:
        from sentencepiece import sentencepiece_model_pb2
    except ImportError as error:
        raise ConfigError(
            "SentencePiece models are read with packages that are not installed; run: "
            "pip install 'fd-tools[sentencepiece]'"
        ) from error
    from google.protobuf.message import DecodeError

    proto: Any = sentencepiece_model_pb2  # made when it is imported, so nothing knows its names
    model = proto.ModelProto()
    try:
        model.ParseFromString(source.read_bytes())
    except (OSError, DecodeError) as error:
        raise ConfigError(
            f"cannot read {source}: {error}; expected a SentencePiece model"
        ) from error
    if not model.pieces:
        raise ConfigError(f"{source} has no pieces; expected a SentencePiece model")
    return model


def _model(model: Any, source: Path) -> Any:
    from tokenizers import models

    kind, pieces = model.trainer_spec.model_type, model.pieces
    has_bytes = any(piece.type == BYTE for piece in pieces)
    unknown = next((n for n, piece in enumerate(pieces) if piece.type == UNKNOWN), None)
    if kind == UNIGRAM:
        vocabulary = [(piece.piece, piece.score) for piece in pieces]
        return models.Unigram(vocabulary, unk_id=unknown, byte_fallback=has_bytes)
    if kind != BPE:
        raise ConfigError(f"{source} is a model of type {kind}; possible: 1 (unigram), 2 (BPE)")
    return models.BPE(
        vocab={piece.piece: number for number, piece in enumerate(pieces)},
        merges=_merges(pieces),
        unk_token=None if unknown is None else pieces[unknown].piece,
        fuse_unk=True,
        byte_fallback=has_bytes,
    )


def _merges(pieces: Any) -> list[tuple[str, str]]:
    """All pairs of pieces that make another one, those of the best-scored pieces first."""
    ids = {piece.piece: number for number, piece in enumerate(pieces) if piece.type == NORMAL}
    found = []
    for piece in sorted(pieces, key=lambda piece: -piece.score):
        if piece.piece not in ids:
            continue
        cuts = ((piece.piece[:at], piece.piece[at:]) for at in range(1, len(piece.piece)))
        halves = [pair for pair in cuts if pair[0] in ids and pair[1] in ids]
        found += sorted(halves, key=lambda pair: (ids[pair[0]], ids[pair[1]]))
    return found


def _add_ends(made: Any, model: Any, folder: Path) -> None:
    from tokenizers import processors

    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text("utf-8")) if file.is_file() else {}
    numbers = {"bos": model.trainer_spec.bos_id, "eos": model.trainer_spec.eos_id}
    asked = {"bos": config.get("add_bos_token", True), "eos": config.get("add_eos_token", False)}
    ends = {
        name: (model.pieces[number].piece, number)
        for name, number in numbers.items()
        if asked[name] and 0 <= number < len(model.pieces)
    }
    if ends:
        before, after = ([ends[name][0]] if name in ends else [] for name in ("bos", "eos"))
        made.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after],
            pair=[*before, "$A", *after, *before, "$B:1", *after],
            special_tokens=[*ends.values()],
        )
