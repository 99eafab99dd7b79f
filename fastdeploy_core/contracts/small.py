"""The small kinds: model families, checkpoint formats, parsers, logits processors, grammar
backends, launchers, KV stores."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

from .model import MediaProcessor, MediaRules, ModelShapes, StoredTensor

if TYPE_CHECKING:
    import numpy as np

    from fastdeploy_core.tensor import Tensor, TensorLibrary
    from fastdeploy_core.types import MediaItem, SamplingParams, StructuredOutputsParams

    from .device import DeviceBackend


@runtime_checkable
class CausalLM(Protocol):
    """A model family. Entry-point name = the architecture string of config.json.

    Constructed as `Model(config, build)`, config being config.json as read; see
    layers.ModelBuilder for what `build` offers. Its static method `shapes` must work without a
    tensor library, so the module imports none at its top. `features` are words of
    model.MODEL_FEATURES: no batch carries what a family does not declare.
    """

    features: frozenset[str]

    @staticmethod
    def shapes(config: Mapping[str, Any], tp_size: int, dtype: str) -> ModelShapes:
        """The shapes of one rank; ConfigError when config or tp_size cannot be served."""
        ...

    def forward(self, input_ids: Tensor, positions: Tensor, context: Any) -> Tensor:
        """input_ids, positions: [num_tokens] int64; returns hidden states [num_tokens, hidden].

        Where context.rows (layers.ForwardContext) names tokens, it returns theirs alone, [n,
        hidden]: what stands after the last block's attention need not be computed for others. Added
        in contract 1.0."""
        ...

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[num_rows, hidden] to [num_rows, vocab_size], float32."""
        ...

    def load_weights(self, tensors: Iterable[tuple[str, StoredTensor]]) -> list[str]:
        """Take every tensor it knows, by checkpoint name; return names it does not know."""
        ...


@runtime_checkable
class GreedyLM(CausalLM, Protocol):
    """A family that finds the likeliest tokens without holding all logits."""

    def greedy(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """[num_rows, hidden] to the likeliest ids [num_rows] int64 (the smallest among equals) and
        their logits [num_rows] float32, NaN where the row has one; the same on every rank."""
        ...


@runtime_checkable
class MultimodalLM(CausalLM, Protocol):
    """A family that also takes pictures or videos. Its `features` hold "embeddings", and
    "positions" if tokens have positions of three axes; then its attention layers need "offsets".

    In a step that has vectors, `context.embedded` (layers.EmbeddedRows) says which tokens'
    embeddings they replace. In a step whose positions are not the same on all axes, forward() gets
    [3, num_tokens], and makes of them the table `context.rotary`, whose row n is token n's.

    An attribute `vector_width`, how wide encode() makes vectors, says that nothing on the host
    depends on which tokens have vectors: steps with prompts and vectors may then be captured
    graphs. In these a vector may be named several times, each time but one with zeros after its
    first `hidden` (contract 1.5). Added in contract 1.1."""

    @staticmethod
    def media(config: Mapping[str, Any], folder: Path, rules: MediaRules) -> MediaProcessor:
        """The processor for a front end. `folder`: the model's, with the files of its processor.
        ConfigError if they are missing or cannot be served. Needs no tensor library."""
        ...

    def encode(self, items: Sequence[MediaItem]) -> Tensor:
        """The vectors of all items, one item's rows after the other's, [sum of num_rows, hidden] in
        the model's dtype, or wider where forward() makes more of them. No item's rows depend on
        another item."""
        ...


@runtime_checkable
class ExtensibleLM(CausalLM, Protocol):
    """A family whose parts a drafter may share and continue. The core's own families are. Where its
    blocks lie in a list `layers`, a drafter may put a part of its own around one of them, which is
    called as the block is: so it sees what blocks between the first and the last return."""

    embedding: Callable[[Tensor], Tensor]  # [num_tokens] int64 to [num_tokens, hidden]
    # The final one: norm(x), and norm.add(x, residual or None) -> (norm of the sum, the sum)
    norm: Any
    # lm_head(hidden) is what compute_logits returns, lm_head.greedy(hidden) what GreedyLM.greedy
    # does
    lm_head: Any

    @property
    def mtp_weights(self) -> Mapping[str, StoredTensor]:
        """Weights of multi-token-prediction layers by checkpoint name, kept unread."""
        ...

    def block(
        self, build: Any, prefix: str, number: int
    ) -> Callable[..., tuple[Tensor, Tensor | None]]:
        """One more decoder block with a cache of its own, under that checkpoint prefix, made as the
        family's number-th would be. Call it with (x, residual or None, positions, context), which
        it may overwrite: it returns the two addends of its output, the second None where they are
        added already."""
        ...


@runtime_checkable
class PoolingLM(CausalLM, Protocol):
    """The family of that name: it pools each prompt of another family's model to one vector. Its
    `features` hold "pooling"; forward() returns a row for each prompt that ends in the step, and
    compute_logits() makes of these [num_rows, width of a vector] float32. Added in contract 1.4."""

    @staticmethod
    def adapt(
        folder: Path, tokenizer: Path, config: Mapping[str, Any], asked: Mapping[str, Any]
    ) -> dict[str, Any]:
        """config.json as the engine shall read it: "architectures" is ["PoolingLM"]; "pooling" is
        what front ends must know; "engine_arguments", by name, take the place of the user's. asked:
        "runner", "convert" and "pooler_config". ConfigError for what cannot be. Needs no tensor
        library."""
        ...

    @staticmethod
    def methods() -> Mapping[str, Callable[..., Any]]:
        """What LLM can do with it, such as embed: functions whose first argument is the LLM."""
        ...


@runtime_checkable
class CheckpointFormat(Protocol):
    """A model that is stored otherwise than as config.json and *.safetensors. The entry point's
    name is the suffix of its files in lower case, without the dot.

    Constructed as `Driver(path)`: a file of that suffix, or a folder that has such files and not
    both config.json and *.safetensors. The parent process constructs it to configure the engine,
    every worker again with `path` for the tensors. The constructor reads headers at most. All raise
    WeightError for a checkpoint that is damaged or incomplete, ConfigError or UnsupportedModel for
    a model that cannot be served; messages name the file. Added in contract 1.0."""

    name: str
    contract: tuple[int, int]
    path: Path  # where the model is; its last part names the model for clients

    def __init__(self, path: Path) -> None: ...

    @property
    def files(self) -> Sequence[Path]:
        """All files that tensors are read from."""
        ...

    def config(self, quantization: str) -> dict[str, Any]:
        """The model's config.json as Hugging Face writes it, with `quantization_config` for tensors
        that stay quantized. `quantization` is what --quantization says, empty without it."""
        ...

    def generation_config(self) -> dict[str, Any]:
        """generation_config.json: sampling defaults and eos_token_id."""
        ...

    def tokenizer_folder(self, cache: Path) -> Path:
        """A folder with tokenizer.json and tokenizer_config.json. One that has to be made is made
        below `cache`, which may not exist yet, and found there the next time. Called where the user
        names no other tokenizer."""
        ...

    def tensors(
        self,
        config: Mapping[str, Any],
        device: DeviceBackend,
        dtype: str,
        is_wanted: Callable[[str], bool],
    ) -> Sequence[tuple[str, StoredTensor]]:
        """Every tensor by its name in a Hugging Face checkpoint of the architecture, unread, in the
        order that is cheapest to read. `config` is config() with the user's overrides, `dtype`
        the one that the model computes in and that tensors of fewer bits are decoded to.
        `is_wanted(name)` says whether the model has a place for a tensor of that name."""
        ...


@runtime_checkable
class ModelSource(Protocol):
    """Where a model comes from that is named instead of given as a path, such as a hub.
    FD_MODEL_SOURCE is the entry point's name.

    Constructed as `Driver()` in the parent process, which uses the folder alone from then on.
    Added in contract 1.2."""

    name: str
    contract: tuple[int, int]

    def __init__(self) -> None: ...

    def fetch(self, model: str, revision: str, folder: Path | None) -> Path:
        """A local folder with the model's config.json, tokenizer and *.safetensors, downloaded
        where it is not there yet. `revision` is a branch, tag or commit, empty for the default.
        `folder` is where downloads are kept, None for the source's own place. Raises ConfigError
        for a model or revision that does not exist, WeightError for files that are not what the
        source promised; messages say what to do next."""
        ...


@dataclass(slots=True)
class ParsedDelta:
    """What a stream parser made of newly arrived text."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCallDelta] = field(default_factory=list)


@dataclass(slots=True)
class ToolCallDelta:
    """Part of the index-th tool call: id and name come once, arguments may come in pieces."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@runtime_checkable
class ReasoningParser(Protocol):
    """One instance per answer: `Driver(prompt_text, chat_template_kwargs)`. Non-streaming output is
    produced by pushing the whole text at once, so streaming and non-streaming cannot differ.

    `markers`, an attribute of the class: special tokens that it reads. They stay in the text that
    it gets; other special tokens are left out.

    `thinking`, an attribute that it may have, asked before any text: how the answer will think.
    `end` is the token that ends the thinking, `begin` the one that begins it, or None if the prompt
    has it. A grammar binds after that end only. None, or no such attribute: from the first
    token."""

    markers: ClassVar[tuple[str, ...]]

    def push(self, text: str) -> ParsedDelta:
        """Newly generated text; what is ambiguous is held back."""
        ...

    def finish(self) -> ParsedDelta:
        """The text has ended: release what was held back."""
        ...


@runtime_checkable
class ToolParser(Protocol):
    """One instance per answer: `Driver(tools)`; push, finish and markers as in ReasoningParser.

    A call begins with its id and name, once its name is certain; until then it may still be
    content. Its arguments follow in pieces, as they become certain, or at once. A call that has
    begun stays one: where the model goes on with what is no JSON, or is cut off, its arguments
    carry the text."""

    markers: ClassVar[tuple[str, ...]]

    def push(self, text: str) -> ParsedDelta:
        """Newly generated text (reasoning already removed)."""
        ...

    def finish(self) -> ParsedDelta:
        """The text has ended."""
        ...


@dataclass(frozen=True, slots=True)
class ProcessorContext:
    """What a logits processor is built from."""

    xp: TensorLibrary
    device: str
    vocab_size: int
    max_num_seqs: int
    tokenizer_json: str = ""  # path of the model's tokenizer.json; empty when it has none


@runtime_checkable
class LogitsProcessor(Protocol):
    """Changes logits before sampling; constructed once per worker as `Driver(ProcessorContext)`.
    An attribute `arguments`, a set, names the keys of logits_processors_args that it takes."""

    def validate(self, params: SamplingParams) -> None:
        """Raise InvalidRequest if logits_processors_args is wrong for this processor."""
        ...

    def add(self, seq_id: int, params: SamplingParams, prompt_token_ids: np.ndarray) -> bool:
        """A sequence arrives; False: this processor has nothing to do with it."""
        ...

    def remove(self, seq_id: int) -> None:
        """It left."""
        ...

    def apply(
        self, logits: Tensor, seq_ids: Sequence[int], output_token_ids: Sequence[np.ndarray]
    ) -> Tensor:
        """logits: [len(seq_ids), vocab_size] float32, rows of the sequences it accepted.

        With speculation a sequence has several rows, one after the other: the first after its known
        tokens, the others each after one more draft, which may turn out wrong. So what a processor
        remembers must come from the first of a sequence's rows alone."""
        ...


@runtime_checkable
class GrammarMatcher(Protocol):
    """The state of one sequence in its grammar."""

    def accept(self, token_ids: Sequence[int]) -> int:
        """Advance by tokens; returns how many fit (all, unless a draft is wrong)."""
        ...

    def rollback(self, num_tokens: int) -> None:
        """Undo the last accepted tokens."""
        ...

    def fill_mask(self, mask: np.ndarray) -> None:
        """mask: [ceil(vocab_size / 32)] int32, written whole; bit t % 32 of word t // 32 set: token
        t is possible. At least one is, the end of text after the end of the grammar.

        InvalidRequest ends the request: the grammar cannot go on from here, or takes others'
        time."""
        ...

    def is_finished(self) -> bool:
        """Whether only the end of text can follow."""
        ...


@runtime_checkable
class BesideMatcher(GrammarMatcher, Protocol):
    """A matcher that may compute masks beside the steps, in own threads. Added in contract 1.5."""

    def begin_mask(self) -> None:
        """The next fill_mask will be asked for here; it may wait for what begins now."""
        ...

    def is_ready(self) -> bool | None:
        """Whether fill_mask would not wait; None: masks take so little that a step may wait for
        them. Otherwise the sequence takes no part in a step before it is. Asked from another
        thread."""
        ...


@runtime_checkable
class GrammarBackend(Protocol):
    """Constructed as `Driver(tokenizer_json, vocab_size, eos_token_ids)` in front end and worker;
    the first is the path of the model's tokenizer.json."""

    name: str
    contract: tuple[int, int]

    def compile(self, params: StructuredOutputsParams, options: Mapping[str, Any]) -> bytes:
        """Check and compile, in a process of its own with a time limit; else InvalidRequest."""
        ...

    def matcher(self, compiled: bytes) -> GrammarMatcher:
        """A fresh state; cheap when asked again. The first call comes from a thread of its own."""
        ...


@dataclass(frozen=True, slots=True)
class InstanceSpec:
    """A server to start: words after the Python interpreter, in which a launcher replaces the words
    {host} and {port} by where it has to listen."""

    name: str
    command: tuple[str, ...]
    port: int
    num_devices: int = 0  # accelerators that it needs for itself


@runtime_checkable
class Launcher(Protocol):
    """Starts servers on one host or several and ends them; requests never pass through it. One
    thread calls it. Constructed as `Driver(options)`, the texts of --launcher-config; ConfigError
    for one that it does not know. Added in contract 1.2."""

    name: str
    contract: tuple[int, int]
    # Whether this process is the one that runs the router: one of all that were given these
    # options.
    is_head: bool

    def start(self, specs: Sequence[InstanceSpec]) -> list[str]:
        """Starts all of them, or none and raises ConfigError or WorkerError; called once. Returns
        HOST:PORT of each, at which it may not answer yet."""
        ...

    def exit_code(self, name: str) -> int | None:
        """How a server ended, negative for a signal; None while it runs, or where another process
        is in charge of it. A lost host ends its servers."""
        ...

    def restart(self, name: str) -> str:
        """Starts a server that has ended again; returns HOST:PORT, which may be another one."""
        ...

    def stop(self, grace_s: float) -> None:
        """Ends all servers of this process: SIGTERM, and SIGKILL to what still runs after grace_s.
        Idempotent, and called before `start` without effect."""
        ...


@runtime_checkable
class KVStore(Protocol):
    """Keeps KV blocks outside the engine, such as on disk. Constructed as `Driver(options)`: the
    mapping --kv-store-config; ConfigError for an option that it does not know or cannot use.

    A store moves bytes, and may lose any of them at any time; names, checksums, threads, deadlines
    and failures are the core's business. Calls block and come from several threads at once. Names
    are 64 hexadecimal digits. Added in contract 1.2.
    """

    name: str
    contract: tuple[int, int]

    def find(self, names: Sequence[str]) -> int:
        """How many of the leading names are there; `get` may still fail for them."""
        ...

    def get(self, name: str, parts: Sequence[memoryview]) -> bool:
        """Fill the parts one after the other. False, with anything in the parts, where the name is
        not there or does not hold exactly so many bytes."""
        ...

    def put(self, name: str, parts: Sequence[memoryview]) -> None:
        """Keep the parts, one after the other, in place of what the name had. Whoever reads
        meanwhile gets all of the old or all of the new bytes, or False."""
        ...

    def close(self) -> None:
        """Give everything back; idempotent. No call is under way."""
        ...
