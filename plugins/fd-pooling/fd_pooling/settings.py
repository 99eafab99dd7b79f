"""What a model's prompts are pooled to, and how: read from its files, and from the arguments.

The files: config.json, and those of sentence-transformers (modules.json and the folders that it
names, sentence_bert_config.json). The result stands in the configuration as "pooling".
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Final, Literal

from fastdeploy_core.config.model import read_json
from fastdeploy_core.errors import ConfigError, UnsupportedModel
from fastdeploy_core.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

Task = Literal["embed", "classify", "reward"]
POOLING_TYPES: Final = ("LAST", "CLS", "MEAN", "STEP")
ACTIVATIONS: Final = ("none", "sigmoid", "softmax", "tanh", "relu")
ENCODERS: Final = ("Bert", "Roberta", "XLMRoberta")
# Ends of architectures that are not ...ForCausalLM, longest first, and what they are for.
_ENDINGS: Final[tuple[tuple[str, Task], ...]] = (
    ("ForSequenceClassification", "classify"),
    ("ForProcessRewardModel", "reward"),
    ("ForRewardModel", "reward"),
    ("ForTextEncoding", "embed"),
    ("ForMaskedLM", "embed"),
    ("EmbeddingModel", "embed"),
    ("ForCausalLM", "embed"),
    ("Model", "embed"),
)
# sentence-transformers' keys of 1_Pooling/config.json, and its newer words.
_MODES: Final = {"cls_token": "CLS", "mean_tokens": "MEAN", "lasttoken": "LAST"}
_WORDS: Final = {"cls": "CLS", "mean": "MEAN", "lasttoken": "LAST"}
# vLLM's names of the same settings.
_ALIASES: Final = {
    "seq_pooling_type": "pooling_type",
    "activation": "use_activation",
    "softmax": "use_activation",
}
# Models whose authors say that any number of first dimensions is an embedding, while their
# config.json does not: the model card of Qwen3-Embedding ("MRL Support").
_MATRYOSHKA: Final = {("Qwen3", 1024, 28), ("Qwen3", 2560, 36), ("Qwen3", 4096, 36)}


@dataclass(frozen=True, slots=True)
class PoolingSettings:
    """How prompts of this model are pooled. Plain values: it travels in the configuration."""

    task: Task
    architecture: str  # the family whose hidden states are pooled
    pooling_type: str  # of POOLING_TYPES
    head: Literal["none", "score", "tokens", "mlp", "bert", "roberta"]
    width: int  # of a vector, before it is cut
    normalize: bool = False  # vectors get length 1
    activation: str = "none"  # of ACTIVATIONS, after the head
    labels: tuple[str, ...] = ()  # of classes
    # Head "tokens": of no and yes; head "bert": the separator; pooling type STEP: after steps.
    token_ids: tuple[int, ...] = ()
    template: str = ""  # of scored pairs: "qwen3_reranker"; empty: the tokenizer's own pairs
    # Numbers of first dimensions that are an embedding of their own; (0,): any.
    dimensions: tuple[int, ...] = ()
    max_position_embeddings: int = 0  # config.json's; 0: it does not say, or in another word

    @classmethod
    def of(cls, value: Mapping[str, Any]) -> PoolingSettings:
        """The settings out of a configuration, where tuples may have become lists."""
        names = {field.name for field in fields(cls)}
        found: dict[str, Any] = {
            name: tuple(item) if isinstance(item, list) else item
            for name, item in value.items()
            if name in names
        }
        return cls(**found)

    def as_config(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {
            name: list(item) if isinstance(item, tuple) else item
            for name, item in asdict(self).items()
        }

    @property
    def is_encoder(self) -> bool:
        """Whether tokens see those after them, so that a prompt is computed at once."""
        return stem(self.architecture)[0] in ENCODERS

    @property
    def needs_whole_prompts(self) -> bool:
        """Whether neither a chunk nor a cached prefix of a prompt is enough."""
        return self.is_encoder or self.pooling_type in ("CLS", "MEAN")


def stem(architecture: str) -> tuple[str, str]:
    """The family and the ending: ("Qwen3", "ForSequenceClassification")."""
    for ending, _ in _ENDINGS:
        if architecture.endswith(ending):
            return architecture.removesuffix(ending), ending
    return architecture, ""


def read_settings(
    folder: Path, tokenizer: Path, config: Mapping[str, Any], asked: Mapping[str, Any]
) -> PoolingSettings:
    """The settings of the model in a folder; ConfigError or UnsupportedModel for what cannot be.
    `asked`: see contracts.small.PoolingLM.adapt."""
    family, ending = stem(str(config["architectures"][0]))
    own_task = dict(_ENDINGS).get(ending)
    if own_task is None:
        raise UnsupportedModel(
            f"prompts of architecture {family!r} cannot be pooled; possible: "
            f"{', '.join(ending for ending, _ in _ENDINGS)}"
        )
    task = _task(str(asked.get("convert") or "auto"), own_task, ending)
    is_encoder = family in ENCODERS
    if not is_encoder and config.get("is_causal") is False:
        raise UnsupportedModel(
            f"config.json says is_causal false: tokens of this {family} see those after them, "
            f"which is served for {', '.join(ENCODERS)} alone"
        )
    sentence, name = SentenceFiles(folder), "max_position_embeddings"
    longest = _whole(config, name) if is_encoder or config.get(name) is not None else 0
    found = PoolingSettings(
        task=task,
        architecture=f"{family}{'Model' if is_encoder else 'ForCausalLM'}",
        pooling_type="CLS" if is_encoder else "LAST",
        head=_head(family, ending, task, is_encoder),
        width=_whole(config, "hidden_size"),
        normalize=task == "embed",
        max_position_embeddings=longest,
    )
    if task == "embed":
        if sentence.is_there:
            found = replace(
                found, pooling_type=sentence.pooling_type, normalize=sentence.normalizes
            )
        found = replace(found, dimensions=_dimensions(family, config))
    else:
        found = _with_classes(found, ending, config, tokenizer)
    return _checked(_overridden(found, asked.get("pooler_config") or {}))


def _task(convert: str, own: Task, ending: str) -> Task:
    if convert in ("auto", "none"):
        return own
    has_head = ending not in ("ForCausalLM", "Model")
    if has_head and convert != own and {convert, own} != {"classify", "reward"}:
        raise ConfigError(
            f"--convert {convert} is not possible for ...{ending}; possible: auto, {own}"
        )
    return convert  # type: ignore[return-value]  # the argument table knows these alone


def _head(
    family: str, ending: str, task: Task, is_encoder: bool
) -> Literal["none", "score", "tokens", "mlp", "bert", "roberta"]:
    if task == "embed":
        return "none"
    if is_encoder:
        if ending != "ForSequenceClassification":
            raise ConfigError(
                f"{family}{ending} has no head that classifies; possible: --convert embed"
            )
        return "bert" if family == "Bert" else "roberta"
    if ending in ("ForRewardModel", "ForProcessRewardModel"):
        return "mlp"
    if ending == "ForSequenceClassification":
        return "score"
    if task == "reward":
        raise ConfigError(
            f"{family}{ending} has no head of rewards; possible: --convert embed or classify"
        )
    return "tokens"


def _with_classes(
    found: PoolingSettings, ending: str, config: Mapping[str, Any], tokenizer: Path
) -> PoolingSettings:
    """What a head computes."""
    family = stem(found.architecture)[0]
    if found.head == "tokens":
        words = config.get("classifier_from_token") or ["no", "yes"]
        template = "qwen3_reranker" if family == "Qwen3" else ""
        found = replace(found, width=1, labels=(str(words[-1]),), template=template)
        return replace(found, activation="sigmoid", token_ids=_ids_of(words, tokenizer))
    names = config.get("id2label") or {}
    # transformers' default is two.
    count = int(config.get("num_labels") or len(names) or (1 if ending == "ForRewardModel" else 2))
    labels = tuple(str(names.get(str(n), f"LABEL_{n}")) for n in range(count))
    found = replace(found, width=count, labels=labels)
    if ending == "ForProcessRewardModel":
        found = replace(found, pooling_type="STEP", activation="softmax")
    elif found.task == "classify":
        found = replace(found, activation=_activation(count, config))
    if found.head == "bert":  # tokens after it are of the second type
        found = replace(found, token_ids=_ids_of_separator(tokenizer))
    if count == 1 and family == "Qwen3":  # a reranker whose head was made of its tokens
        found = replace(found, template="qwen3_reranker")
    return found


def _activation(count: int, config: Mapping[str, Any]) -> str:
    """transformers' pipelines: by problem_type, else by the number of labels. sentence-transformers
    writes its own choice into config.json."""
    own = config.get("sentence_transformers")
    path = own.get("activation_fn") if isinstance(own, Mapping) else None
    path = path or config.get("sbert_ce_default_activation_function")
    if path is not None:
        word = str(path).rpartition(".")[2].lower()
        word = {"identity": "none"}.get(word, word)
        if word not in ACTIVATIONS:
            raise UnsupportedModel(
                f"config.json names the activation {path!r}; possible: {', '.join(ACTIVATIONS)}"
            )
        return word
    kind = config.get("problem_type")
    if kind == "regression":
        return "none"
    return "sigmoid" if count == 1 or kind == "multi_label_classification" else "softmax"


def _ids_of(words: Any, folder: Path) -> tuple[int, ...]:
    if not isinstance(words, list) or len(words) != 2:
        raise ConfigError(
            f'classifier_from_token must be two tokens, such as ["no", "yes"]; got {words!r:.60}'
        )
    tokenizer = Tokenizer.load(folder)
    found = [tokenizer.encode(str(word), False) for word in words]
    if any(len(ids) != 1 for ids in found):
        raise ConfigError(
            f"{words[0]!r} and {words[1]!r} are not one token each of this tokenizer; name others: "
            '--hf-overrides \'{"classifier_from_token": ["no", "yes"]}\', or pool vectors: '
            "--convert embed"
        )
    return tuple(ids[0] for ids in found)


def _ids_of_separator(folder: Path) -> tuple[int, ...]:
    named = read_json(folder / "tokenizer_config.json").get("sep_token", "[SEP]")
    text = named.get("content") if isinstance(named, Mapping) else named
    found = Tokenizer.load(folder).token_to_id(str(text))
    if found is None:
        raise ConfigError(f"the tokenizer has no token {text!r}, which divides a pair of texts")
    return (found,)


def _dimensions(family: str, config: Mapping[str, Any]) -> tuple[int, ...]:
    listed = config.get("matryoshka_dimensions")
    if isinstance(listed, list) and listed:
        if not all(type(n) is int and n > 0 for n in listed):
            raise ConfigError(f"matryoshka_dimensions must be numbers above 0, got {listed!r:.60}")
        return tuple(sorted(listed))
    size = (family, config.get("hidden_size"), config.get("num_hidden_layers"))
    return (0,) if config.get("is_matryoshka") or size in _MATRYOSHKA else ()


def _overridden(found: PoolingSettings, given: Mapping[str, Any]) -> PoolingSettings:
    """--pooler-config, in vLLM's and FastDeploy's spellings."""
    known = ("pooling_type", "normalize", "use_activation", "dimensions", "step_tag_id")
    for given_name, value in given.items():
        name = _ALIASES.get(given_name, given_name)
        if name == "pooling_type" and isinstance(value, str):
            found = replace(found, pooling_type=value.upper())
        elif name == "normalize" and isinstance(value, bool):
            found = replace(found, normalize=value)
        elif name == "use_activation" and isinstance(value, bool):
            if not value:
                found = replace(found, activation="none", normalize=False)
            elif found.task == "embed":
                found = replace(found, normalize=True)
        elif name == "dimensions" and type(value) is int and 0 < value <= found.width:
            found = replace(found, dimensions=tuple(sorted({*found.dimensions, value} - {0})))
        elif name == "step_tag_id" and type(value) is int and found.task == "reward":
            found = replace(found, token_ids=(value,))
        else:
            raise ConfigError(
                f"--pooler-config has {given_name!r}: {value!r:.40}; possible: pooling_type "
                f"({', '.join(POOLING_TYPES)}), and {', '.join(known[1:])}"
            )
    return found


def _checked(found: PoolingSettings) -> PoolingSettings:
    kind = found.pooling_type
    if kind not in POOLING_TYPES:
        raise UnsupportedModel(
            f"pooling type {kind!r} is not served; possible: {', '.join(POOLING_TYPES)}"
        )
    if kind == "STEP" and (found.is_encoder or found.task == "embed"):
        raise ConfigError("pooling type STEP is for reward models whose tokens see earlier ones")
    if kind == "STEP" and not found.token_ids:
        raise ConfigError(
            "pooling type STEP needs the token after each step: --pooler-config "
            "'{\"step_tag_id\": ID}'"
        )
    if kind != "CLS" and found.head in ("bert", "roberta"):
        raise ConfigError(f"the head of this model reads its first token; {kind} is not possible")
    if found.head == "tokens" and kind != "LAST":
        raise ConfigError(f"scores of tokens are those after the last token; got {kind}")
    return found


class SentenceFiles:
    """What sentence-transformers wrote beside a model; UnsupportedModel for modules that are not
    served."""

    def __init__(self, folder: Path) -> None:
        self.is_there = (folder / "modules.json").is_file()
        self.pooling_type, self.normalizes = "", False
        # Words that the model was trained to read in front of texts, by what the texts are for.
        self.prompts = _sentence_prompts(folder / "config_sentence_transformers.json")
        self.max_tokens = _sentence_length(folder / "sentence_bert_config.json")
        for module in _read_list(folder / "modules.json") if self.is_there else ():
            kind, path = str(module.get("type", "")).rpartition(".")[2], str(module.get("path"))
            if kind == "Pooling":
                self.pooling_type = _sentence_pooling(folder / path / "config.json")
            elif kind == "Normalize":
                self.normalizes = True
            elif kind != "Transformer":
                raise UnsupportedModel(
                    f"modules.json of {folder.name} has a module {kind!r}; possible: Transformer, "
                    "Pooling, Normalize"
                )
        if self.is_there and not self.pooling_type:
            raise UnsupportedModel(f"modules.json of {folder.name} has no Pooling")


def _read_list(path: Path) -> list[dict[str, Any]]:
    import json

    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ConfigError(f"{path} must be a list of objects")
    return value


def _sentence_pooling(path: Path) -> str:
    config = read_json(path)
    if config.get("include_prompt") is False:
        raise UnsupportedModel(f"{path} leaves prompts out of the mean, which is not served")
    word = config.get("pooling_mode")
    chosen = [word] if isinstance(word, str) else word
    if isinstance(chosen, list):
        found = [_WORDS.get(str(word), str(word)) for word in chosen]
    else:
        start = "pooling_mode_"
        on = [key.removeprefix(start) for key, value in config.items() if value is True]
        keys = [key for key in on if f"{start}{key}" in config]
        found = [_MODES.get(key, key) for key in keys]
    if len(found) != 1 or found[0] not in POOLING_TYPES:
        raise UnsupportedModel(
            f"{path} asks for pooling {', '.join(found) or 'of no kind'}; possible: one of "
            f"{', '.join(_WORDS)}"
        )
    return found[0]


def _sentence_prompts(path: Path) -> dict[str, str]:
    config = read_json(path) if path.is_file() else {}
    given = config.get("prompts")
    found = dict(given) if isinstance(given, Mapping) else {}
    if found.get(config.get("default_prompt_name")):
        logger.warning(
            "%s names a default prompt, %r, which sentence-transformers writes before each text; "
            "here texts are pooled as they come",
            path.name,
            config["default_prompt_name"],
        )
    return {name: text for name, text in found.items() if isinstance(text, str) and text}


def _sentence_length(path: Path) -> int:
    """max_seq_length, 0: none."""
    value = read_json(path).get("max_seq_length") if path.is_file() else None
    return value if type(value) is int and value > 0 else 0


def _whole(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if type(value) is not int or value < 1:
        raise ConfigError(f"config.json has {name}={value!r}; expected a whole number above 0")
    return value
