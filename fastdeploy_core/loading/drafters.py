"""Builds the configured drafter on one rank, with whatever layers it adds beside the target's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastdeploy_core.config import EngineConfig, SpeculativeConfig
from fastdeploy_core.config.model import read_json
from fastdeploy_core.config.quantization import read_quantization
from fastdeploy_core.contracts.base import Requirements
from fastdeploy_core.contracts.quantizer import make_quantizer
from fastdeploy_core.contracts.speculative import Drafter, DrafterContext
from fastdeploy_core.errors import CapabilityError, ConfigError, FastDeployError, PluginLoadError
from fastdeploy_core.plugins.resolve import DRAFT_QUANTIZER

from .draft_weights import load_draft_weights
from .loader import fill_model

if TYPE_CHECKING:
    from fastdeploy_core.contracts.device import DeviceBackend
    from fastdeploy_core.contracts.ops import KernelTable
    from fastdeploy_core.contracts.quantizer import Quantizer
    from fastdeploy_core.contracts.small import CausalLM
    from fastdeploy_core.layers import ModelBuilder
    from fastdeploy_core.plugins.resolved import ResolvedPlugins

    from .loader import LoadedModel


@dataclass(frozen=True, slots=True)
class Drafters:
    """What one rank has of the configured method."""

    on_device: bool
    drafter: Drafter | None  # None where another rank drafts
    follower: Drafter | None  # a host drafter that continues its drafts
    first_layer: int  # attention layers from here on are the drafter's
    is_continued: bool = False  # on one of the ranks there is a follower


class DrafterMaker:
    """Everything that drafters are built from; used once per start."""

    def __init__(
        self,
        config: EngineConfig,
        speculative: SpeculativeConfig,
        device: DeviceBackend,
        kernels: KernelTable,
        loaded: LoadedModel,
        resolved: ResolvedPlugins,
    ) -> None:
        self._config, self._speculative = config, speculative
        self._device, self._kernels = device, kernels
        self._loaded, self._resolved = loaded, resolved

    def make(self, rank: int, *, captures: bool = False) -> Drafters:
        """What drafts on the host does so on rank 0, what drafts on the device on every rank.
        `captures`: decode steps will be captured."""
        method, needs = self._speculative.method, self._resolved.speculative
        driver = self._resolved.load("speculative", method)
        # Rank 0 alone knows the tokens, so histories can be kept on the device of a single rank
        # only.
        can_keep = captures and self._device.limits.step_buckets is None
        if can_keep and self._config.parallel.tensor_parallel_size == 1:
            driver = getattr(driver, "on_device", driver)
        runs_on = getattr(driver, "runs_on", "")
        if runs_on not in ("host", "device"):
            raise PluginLoadError(
                f"speculative method {method!r} says runs_on = {runs_on!r}; expected 'host' or "
                "'device'"
            )
        on_device = runs_on == "device"
        follower: Drafter | None = None
        if needs.continued_by and rank == 0:
            kind = self._resolved.load("speculative", needs.continued_by)
            follower = self._construct(kind, self._context(needs.continued_options))
        first_layer = len(self._loaded.builder.kv_layers)
        drafter: Drafter | None = None
        if on_device:
            drafter = self._on_device(driver, needs)
        elif rank == 0:
            drafter = self._construct(driver, self._context(self._speculative.options))
        is_continued = bool(needs.continued_by)
        return Drafters(on_device, drafter, follower, first_layer, is_continued)

    def _on_device(self, driver: Any, needs: Requirements) -> Drafter:
        self._check_device(self._speculative.method)
        context = self._device_context(needs)
        drafter = self._construct(driver, context)
        plain = context.builder.unquantized
        if plain:
            self._loaded.report.append(
                f"{len(plain)} draft layers stay unquantized, such as {plain[0]}"
            )
        return drafter

    def _check_device(self, method: str) -> None:
        if self._device.limits.step_buckets is not None:
            raise CapabilityError(
                f"speculative method {method!r} cannot run on device {self._device.name!r}, which "
                "only takes steps of certain shapes; possible: ngram_match or suffix, which draft "
                "on the host"
            )

    def _construct(
        self, driver: Callable[[DrafterContext], Drafter], context: DrafterContext
    ) -> Drafter:
        try:
            with self._device.xp.no_grad():
                return driver(context)
        except FastDeployError:
            raise
        except Exception as error:
            if self._device.is_oom(error) or self._device.is_lost(error):
                raise
            raise PluginLoadError(
                f"the drafter of speculative method {self._speculative.method!r} cannot be built: "
                f"{type(error).__name__}: {error}"
            ) from error

    def _context(self, options: Mapping[str, Any], **layers: Any) -> DrafterContext:
        config = self._config
        return DrafterContext(
            num_speculative_tokens=self._speculative.num_speculative_tokens,
            options=options,
            vocab_size=self._loaded.shapes.vocab_size,
            max_num_seqs=config.batch.max_num_seqs,
            max_model_len=config.model.max_model_len,
            device=self._device,
            kernels=self._kernels,
            hf_config=config.model.hf_config,
            **layers,
        )

    def _device_context(self, needs: Requirements) -> DrafterContext:
        options, loaded = self._speculative.options, self._loaded
        extension = loaded.builder.extension(self._quantizer(needs, {}))
        folder = str(options.get("model") or "")
        return self._context(
            options,
            model=loaded.model,
            builder=extension,
            load_model=partial(self._load_model, loaded.builder, needs),
            load_weights=partial(load_draft_weights, extension, loaded.model, self._config, folder),
        )

    def _quantizer(self, needs: Requirements, hf_config: Mapping[str, Any]) -> Quantizer | None:
        """The draft's own, else the target's."""
        name = self._resolved.name(DRAFT_QUANTIZER)
        if name:
            settings = read_quantization(
                replace(
                    self._config.model,
                    hf_config=hf_config,
                    quantization=needs.draft_quantization,
                )
            )
            quantizers = partial(self._resolved.load, "quantizer")
            return make_quantizer(name, settings.config, self._device, self._kernels, quantizers)
        return None if needs.draft_model else self._loaded.builder.quantizer

    def _load_model(
        self, build: ModelBuilder, needs: Requirements, folder: str, quantization: str
    ) -> CausalLM:
        """DrafterContext.load_model: a whole model beside the target."""
        if folder != needs.draft_model or quantization != needs.draft_quantization:
            raise ConfigError(
                f"the drafter loads the model in {folder!r}, which its requirements did not name "
                f"(draft_model {needs.draft_model!r}); name it in fd_speculative_requirements"
            )
        hf_config = read_json(Path(folder) / "config.json")
        extension = build.extension(self._quantizer(needs, hf_config))
        extension.weights = type(extension.weights)()  # another checkpoint, other spellings
        architecture = str((hf_config.get("architectures") or [""])[0])
        model: CausalLM = self._resolved.load("model", architecture)(hf_config, extension)
        fill_model(model, extension, Path(folder), hf_config, self._config.model)
        return model
