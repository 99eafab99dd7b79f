"""`fastdeploy.LLM`: the offline API with the arguments and method names that vLLM's and FastDeploy
2.x's users write."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from fastdeploy_core.api import llm as core
from fastdeploy_core.api.inputs import Prompt, Prompts, normalise_prompts
from fastdeploy_core.api.llm import LoRA, Params, Priority
from fastdeploy_core.engine.input import Truncation
from fastdeploy_core.errors import InvalidRequest
from fastdeploy_core.types import RequestOutput

from .engine.args_utils import EngineArgs
from .outputs import Answers
from .sampling_params import SamplingParams
from .tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# Names of vLLM's class that have no counterpart, and what there is instead.
_NOT_HERE: Final = {
    "apply_model": "a model runs in its engine's workers, which only plugins reach",
    "collective_rpc": "workers have no methods to call by name; a plugin's hooks run in them",
    "enqueue": "generate(..., stream=True) gives outputs as they come",
    "enqueue_chat": "chat(..., stream=True) gives outputs as they come",
    "finish_weight_update": "update_weights does all of it, with enable_rollout=True (fd-rollout)",
    "init_weight_transfer_engine": "update_weights takes a source (fd-rollout)",
    "llm_engine": "the configuration is LLM.config, the counters are LLM.get_metrics()",
    "model_config": "the configuration is LLM.config.model",
    "reset_mm_cache": "pictures are kept in the prefix cache alone; see reset_prefix_cache",
    "set_tokenizer": "name it when the LLM is made: LLM(model, tokenizer=...)",
    "start_profile": "the engine runs in this process; put a profiler around generate",
    "start_weight_update": "update_weights does all of it, with enable_rollout=True (fd-rollout)",
    "stop_profile": "the engine runs in this process; put a profiler around generate",
    "wait_for_completion": "generate(..., stream=True) gives outputs as they come",
}
_OF_PLUGINS: Final = {
    **dict.fromkeys(("embed", "encode", "classify", "score", "reward"), "runner='pooling'"),
    **dict.fromkeys(("sleep", "wake_up", "update_weights"), "enable_rollout=True (fd-rollout)"),
}
_OLDER: Final = {"multimodal_data": "multi_modal_data"}
_FORMATS: Final = ("auto", "string", "openai")  # templates here take either kind of content


class LLM(core.LLM):
    """A model loaded into this process. Use as a context manager, or call close().

    `engine_args` are the server's engine arguments as keywords, in FastDeploy's or vLLM's spelling;
    an unknown one raises ConfigError with the nearest valid name. Not thread safe.
    """

    tokenizer_class = Tokenizer

    def __init__(self, model: str | Path, **engine_args: Any) -> None:
        engine_args = {name: value for name, value in engine_args.items() if value is not None}
        if engine_args.pop("disable_log_stats", True) is False:  # nobody logs them here anyway
            logger.warning("disable_log_stats has no effect: LLM.get_metrics() has the counters")
        super().__init__(model, **engine_args)

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """As LLM(**asdict(engine_args))."""
        return cls(**asdict(engine_args))

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer, with the names that Hugging Face's have."""
        found = super().get_tokenizer()
        assert isinstance(found, Tokenizer)  # noqa: S101 - tokenizer_class
        return found

    def generate(
        self,
        prompts: Prompts,
        sampling_params: Params = None,
        use_tqdm: bool | Callable[..., Any] = True,
        stream: bool = False,
        *,
        lora_request: LoRA = None,
        priority: Priority = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput] | Iterator[RequestOutput]:
        """As fastdeploy_core's. `tokenization_kwargs`: truncate_prompt_tokens, truncation_side
        ("left" keeps the last tokens), add_special_tokens. `mm_processor_kwargs`: for prompts with
        pictures that have none of their own."""
        given = normalise_prompts(_in_our_words(prompts, mm_processor_kwargs))
        _tokenized_so(given, dict(tokenization_kwargs or {}))
        asked = (sampling_params, bool(use_tqdm), stream, priority, lora_request)
        return self._run(given, *asked)

    def chat(  # vLLM takes by place what the core takes by name
        self,
        messages: Sequence[Any],
        sampling_params: Params = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: LoRA | Mapping[str, Any] = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        *,
        stream: bool = False,
        priority: Priority = None,
    ) -> list[RequestOutput] | Iterator[RequestOutput]:
        """As fastdeploy_core's. A template gets the content of messages as it is, whatever
        `chat_template_content_format` says. FastDeploy 2.x has chat_template_kwargs where vLLM has
        lora_request: either is known there."""
        if isinstance(lora_request, Mapping):
            lora_request, chat_template_kwargs = None, lora_request
        if chat_template_content_format not in _FORMATS:
            raise InvalidRequest(
                f"chat_template_content_format is {chat_template_content_format!r:.40}; possible: "
                f"{', '.join(_FORMATS)}",
                param="chat_template_content_format",
            )
        if tokenization_kwargs:
            raise InvalidRequest(
                "chat takes no tokenization_kwargs; shorten the conversation, or give generate "
                "what LLM.get_tokenizer().apply_chat_template returns",
                param="tokenization_kwargs",
            )
        return super().chat(
            messages,
            sampling_params,
            bool(use_tqdm),
            lora_request=lora_request,
            chat_template=chat_template,
            chat_template_kwargs=chat_template_kwargs,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            mm_processor_kwargs=mm_processor_kwargs,
            stream=stream,
            priority=priority,
        )

    def _outputs(self, *given: Any, **named: Any) -> Iterator[tuple[int, RequestOutput]]:
        with closing(super()._outputs(*given, **named)) as outputs:  # type: ignore[type-var]
            for place, output in outputs:
                output.outputs = Answers(output.outputs)
                yield place, output

    def get_default_sampling_params(self) -> SamplingParams:
        """What sampling_params=None means for this model."""
        default = super().get_default_sampling_params()
        return SamplingParams(**{n: getattr(default, n) for n in default.__struct_fields__})

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Forget every cached prefix; False while requests are running, as those of a stream that
        nobody has read to its end."""
        if reset_running_requests or reset_connector:
            name = "reset_running_requests" if reset_running_requests else "reset_connector"
            raise InvalidRequest(
                f"{name} is not possible: the engine's own cache is forgotten, between calls; what "
                "runs and what a KV store keeps stay",
                param=name,
            )
        return super().reset_prefix_cache()

    def get_world_size(self, include_dp: bool = True) -> int:
        """Ranks that the model is computed on; an LLM is one engine."""
        ranks = self.config.parallel.tensor_parallel_size
        return ranks * (self.config.parallel.data_parallel_size if include_dp else 1)

    def __repr__(self) -> str:
        model = self.config.model
        return f"LLM(model={str(model.path)!r}, max_model_len={model.max_model_len})"

    if not TYPE_CHECKING:  # as in the core's class

        def __getattr__(self, name: str) -> Any:
            if name in _NOT_HERE:
                raise AttributeError(f"LLM has no {name}: {_NOT_HERE[name]}")
            try:
                return super().__getattr__(name)
            except AttributeError:
                if name in _OF_PLUGINS:
                    raise AttributeError(
                        f"LLM has {name} with {_OF_PLUGINS[name]} only; this one was made without"
                    ) from None
                raise


def _tokenized_so(prompts: Sequence[Prompt], options: dict[str, Any]) -> None:
    """Put what a call says of tokenization into its prompts."""
    most = options.pop("truncate_prompt_tokens", None)
    side = options.pop("truncation_side", None) or "left"
    special = options.pop("add_special_tokens", None)
    if options or side not in ("left", "right") or not (most is None or type(most) is int):
        raise InvalidRequest(
            "tokenization_kwargs may have truncate_prompt_tokens (a number), truncation_side (left "
            f"or right) and add_special_tokens; got {', '.join(options) or 'other values'}",
            param="tokenization_kwargs",
        )
    if most is not None and (most < -1 or most == 0):
        raise InvalidRequest(
            f"truncate_prompt_tokens must be -1 or 1 and up, got {most}",
            param="tokenization_kwargs",
        )
    for prompt in prompts:
        if most is not None:
            prompt.truncation = Truncation(most, side)
        if special is not None:
            prompt.add_special_tokens = bool(special)


def _in_our_words(prompts: Prompts, processor_kwargs: Mapping[str, Any] | None) -> Prompts:
    """FastDeploy 2.x's name of pictures is vLLM's; what the call says counts for each of them."""

    def one(prompt: Any) -> Any:
        if not isinstance(prompt, Mapping):
            return prompt
        named = {_OLDER.get(name, name): value for name, value in prompt.items()}
        if processor_kwargs and named.get("multi_modal_data"):
            named["mm_processor_kwargs"] = named.get("mm_processor_kwargs") or processor_kwargs
        return named

    if isinstance(prompts, str | Mapping) or not isinstance(prompts, Sequence):
        found: Prompts = one(prompts)
        return found
    return [one(prompt) for prompt in prompts]
