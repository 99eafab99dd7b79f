"""Every driver that an entry point names, as `mypy` has to find it: constructed as its kind's
Protocol says, and an implementation of it. Nothing imports this file; test_typing.py compares it
with the entry points.
"""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from fastapi import Request, Response
from fd_accelerator.expert_communicator import AllGatherExperts, LoopbackExperts
from fd_accelerator.kept_weights.cache import WeightCache
from fd_agent_apis.request_templates import render_in_child
from fd_beam_search import BeamSearchOutput, BeamSearchParams
from fd_beam_search.offline import beam_search
from fd_beam_search.served import BeamSampling
from fd_beam_search.served import sampling as beam_sampling
from fd_bench.command import main as bench
from fd_calibrate.command import main as quantize
from fd_cpu.attention import X86Attention
from fd_cpu.device import X86Device
from fd_cpu.moe import X86MoE
from fd_cuda.attention.gqa import PagedAttention
from fd_cuda.attention.latent.driver import LatentAttention
from fd_cuda.attention.latent.indexed import IndexedAttention as CudaIndexedAttention
from fd_cuda.attention.quantized import QuantizedAttention
from fd_cuda.device import CudaDevice
from fd_cuda.ipc.transport import CudaIpcTransport
from fd_cuda.moe import CudaMoE
from fd_cuda.states.driver import CudaStates
from fd_dcu.device import DcuDevice
from fd_gaudi.attention import GaudiBlock
from fd_gaudi.device import GaudiDevice
from fd_gaudi.moe import GaudiMoE
from fd_gcu.attention import GcuAttention
from fd_gcu.device import GcuDevice
from fd_gguf.checkpoint import GGUFCheckpoint
from fd_gguf.quantizer import GGUFQuantizer
from fd_grammar_llguidance.backend import LLGuidanceBackend
from fd_hub.aistudio import AIStudio
from fd_hub.huggingface import HuggingFace
from fd_hub.modelscope import ModelScope
from fd_hub.pull import main as pull
from fd_iluvatar.attention import IluvatarAttention
from fd_iluvatar.device import IluvatarDevice
from fd_key_limits.limits import KeyLimits
from fd_kv_disk.disk import DiskStore
from fd_kv_mooncake.transport import MooncakeTransport
from fd_kv_nixl.transport import NixlTransport
from fd_kv_redis.store import RedisStore
from fd_kv_shm.shm import SharedMemoryTransport
from fd_kv_tcp.transport import TcpTransport
from fd_launch.command import main as launch
from fd_launch.processes import LocalLauncher, StaticLauncher
from fd_launch_ray.launcher import RayLauncher
from fd_lora.files import adapter_extras
from fd_lora.layers import AdapterLayers
from fd_lora.served import ServedAdapters
from fd_metax.attention import MetaxAttention
from fd_metax.device import MetaxDevice
from fd_models.blocks.cohere2 import Cohere2ForCausalLM, CohereForCausalLM
from fd_models.blocks.cohere2_moe import Cohere2MoeForCausalLM
from fd_models.blocks.dots1 import Dots1ForCausalLM, HYV3ForCausalLM, SolarOpenForCausalLM
from fd_models.blocks.exaone4 import Exaone4ForCausalLM, ExaoneMoeForCausalLM
from fd_models.blocks.gemma4 import Gemma4ForCausalLM
from fd_models.blocks.glm4 import Glm4ForCausalLM, GlmForCausalLM
from fd_models.blocks.granite import GraniteForCausalLM, GraniteMoeForCausalLM
from fd_models.blocks.hunyuan import HunYuanDenseV1ForCausalLM, HunYuanMoEV1ForCausalLM
from fd_models.blocks.olmoe import OlmoeForCausalLM
from fd_models.blocks.seed_oss import SeedOssForCausalLM
from fd_models.blocks.text_alone import (
    Gemma3ForConditionalGeneration,
    Gemma4ForConditionalGeneration,
    Llama4ForConditionalGeneration,
    Mistral3ForConditionalGeneration,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeForConditionalGeneration,
)
from fd_models.gemma2 import Gemma2ForCausalLM
from fd_models.gemma3 import Gemma3ForCausalLM
from fd_models.glm4_moe import Glm4MoeForCausalLM
from fd_models.gpt_oss import GptOssForCausalLM
from fd_models.latent.deepseek_v3 import DeepseekV3ForCausalLM
from fd_models.latent.deepseek_v32 import DeepseekV32ForCausalLM
from fd_models.latent.glm import Glm4MoeLiteForCausalLM, GlmMoeDsaForCausalLM
from fd_models.latent.indexed import IndexedAttention
from fd_models.llama4 import Llama4ForCausalLM
from fd_models.minimax_m2 import MiniMaxM2ForCausalLM
from fd_models.mistral import MistralForCausalLM
from fd_models.mixtral import MixtralForCausalLM
from fd_models.olmo2 import Olmo2ForCausalLM, Olmo3ForCausalLM
from fd_models.phi3 import Phi3ForCausalLM
from fd_models.qwen2_moe import Qwen2MoeForCausalLM
from fd_models.recurrent.granite4 import GraniteMoeHybridForCausalLM
from fd_models.recurrent.kimi_linear import KimiLinearForCausalLM
from fd_models.recurrent.lfm2 import Lfm2ForCausalLM, Lfm2MoeForCausalLM
from fd_models.recurrent.nemotron_h import NemotronHForCausalLM
from fd_models.recurrent.qwen3_5 import Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM
from fd_models.recurrent.qwen3_next import Qwen3NextForCausalLM
from fd_models.recurrent.states import PlainStates
from fd_models.smollm3 import SmolLM3ForCausalLM
from fd_mybias.processor import MyBiasProcessor
from fd_mycalls.parser import MyCallsParser
from fd_mychip.device import MyChipDevice
from fd_mycluster.launcher import MyClusterLauncher
from fd_mycommand.command import main as mycommand
from fd_mydisk.store import MyDiskStore
from fd_mydraft.drafter import MyDraftDrafter
from fd_myexperts.experts import MyExpertsMoE
from fd_myflash.attention import MyFlashAttention
from fd_myformat.quantizer import MyFormatQuantizer
from fd_mygrammar.backend import MyGrammarBackend
from fd_myhub.source import MyHubSource
from fd_mymesh.communicator import MyMeshExperts
from fd_mymodel.model import MyModelForCausalLM
from fd_myqueue.scheduler import MyQueueScheduler
from fd_mystates.states import MyStatesStates
from fd_mysuffix.checkpoint import MySuffixCheckpoint
from fd_mythoughts.parser import MyThoughtsParser
from fd_mywire.transport import MyWireTransport
from fd_parsers.deepseek import DeepSeekToolParser
from fd_parsers.forced import ForcedTools
from fd_parsers.gemma import FunctionGemmaToolParser, Gemma4ToolParser
from fd_parsers.harmony import HarmonyReasoningParser, HarmonyToolParser
from fd_parsers.hermes import HermesToolParser
from fd_parsers.kimi import KimiK2ToolParser
from fd_parsers.lists import (
    CommandToolParser,
    GraniteToolParser,
    HunyuanToolParser,
    Phi4MiniToolParser,
)
from fd_parsers.llama import (
    Lfm2ToolParser,
    Llama3JsonToolParser,
    Olmo3ToolParser,
    PythonicToolParser,
)
from fd_parsers.mistral import MistralToolParser
from fd_parsers.tags import (
    DeepSeekV32ToolParser,
    GlmToolParser,
    MiniMaxM2ToolParser,
    QwenToolParser,
    SeedOssToolParser,
    TagToolParser,
)
from fd_parsers.think import (
    CommandThinkParser,
    DeepSeekR1Parser,
    ErnieX1Parser,
    Gemma4ThinkParser,
    GraniteThinkParser,
    HunyuanThinkParser,
    MistralThinkParser,
    SeedThinkParser,
    ThinkParser,
)
from fd_parsers.thinking_budget import ThinkingBudgetLogitsProcessor
from fd_pooling.family import PoolingLM as PooledLM
from fd_pooling.routes import invocations
from fd_quant_formats.fp8 import BlockFp8, WFp8AFp8
from fd_quant_formats.integer import W4A8, W8A8, WInt4, WInt8
from fd_quant_formats.mixed import MixedQuantizer
from fd_quant_formats.mxfp4 import Mxfp4
from fd_quant_hub.compressed import CompressedTensors
from fd_quant_hub.gptq import Awq, Gptq
from fd_quant_wint2.published import Wint2
from fd_quant_wint2.trellis import Tet2, Tet3, Tet4
from fd_rollout.control import EngineControl
from fd_rollout.experts import routed_extras
from fd_rollout.offline import METHODS
from fd_rollout.sources import Folder, SharedMemory, WeightSource
from fd_rollout.worker import RolloutWorker
from fd_router.command import main as router
from fd_scale_out.experts import expert_ranks
from fd_scale_out.front_ends import FrontEnds
from fd_scale_out.handover.handovers import Handovers
from fd_scale_out.kv_events import KVEvents
from fd_scale_out.links import engines
from fd_scale_out.shared_queue import SharedQueue
from fd_scale_out.stored_blocks import StoredBlocks
from fd_sched_redis.scheduler import GlobalScheduler, SplitwiseScheduler
from fd_spec_eagle.dflash import DFlashDrafter
from fd_spec_eagle.eagle3 import Eagle3Drafter
from fd_spec_mtp.drafter import MTPDrafter
from fd_speculative.draft_model import DraftModel
from fd_speculative.ngram import NgramDrafter
from fd_speculative.suffix import SuffixDrafter
from fd_tools.chat import chat, complete
from fd_tools.collect_env import main as collect_env
from fd_tools.plugins_doctor import main as plugins_doctor
from fd_tools.plugins_report import main as plugins_report
from fd_tools.plugins_shapes import main as plugins_shapes
from fd_tools.plugins_show import main as plugins_show
from fd_tools.plugins_why import main as plugins_why
from fd_tools.run_batch import main as run_batch
from fd_tools.shapes import capture
from fd_tools.tokenizer import main as tokenizer
from fd_vision.ernie4_5_vl import Ernie4_5_VLMoeForConditionalGeneration
from fd_vision.paddleocr_vl import PaddleOCRVLForConditionalGeneration
from fd_vision.qwen2_5_vl import Qwen2_5_VLForConditionalGeneration
from fd_vision.qwen3_vl import Qwen3VLForConditionalGeneration, Qwen3VLMoeForConditionalGeneration
from fd_xpu.attention import XpuAttention
from fd_xpu.device import XpuDevice
from fd_xpu.moe import XpuMoE

from fastdeploy_core.api.inputs import Prompts
from fastdeploy_core.api.llm import LLM
from fastdeploy_core.config import EngineConfig, KVEventsConfig, RequestSchedulerConfig
from fastdeploy_core.config.server import ServerConfig
from fastdeploy_core.contracts.attention import (
    AttentionBackend,
    AttentionSpec,
    StateBackend,
    StateSpec,
)
from fastdeploy_core.contracts.command import Command
from fastdeploy_core.contracts.device import (
    Communicator,
    DeviceBackend,
    DeviceOptions,
    PackingDevice,
)
from fastdeploy_core.contracts.kv_transport import KVTransport, TransportOptions
from fastdeploy_core.contracts.moe import (
    AdaptedMoEBackend,
    ExpertCommunicator,
    ExpertGroup,
    MoEBackend,
    MoESpec,
)
from fastdeploy_core.contracts.ops import KernelTable
from fastdeploy_core.contracts.quantizer import ComposedQuantizer, FindQuantizer, Quantizer
from fastdeploy_core.contracts.scheduler import RequestScheduler
from fastdeploy_core.contracts.small import (
    CausalLM,
    CheckpointFormat,
    GrammarBackend,
    KVStore,
    Launcher,
    LogitsProcessor,
    ModelSource,
    MultimodalLM,
    PoolingLM,
    ProcessorContext,
    ReasoningParser,
    ToolParser,
)
from fastdeploy_core.contracts.speculative import DeviceDrafter, DrafterContext, HostDrafter
from fastdeploy_core.engine.client import EngineLink
from fastdeploy_core.engine.core import EngineCore
from fastdeploy_core.engine.processes.supervisor import Listener
from fastdeploy_core.kvcache import CachePlan
from fastdeploy_core.layers import ModelBuilder
from fastdeploy_core.layers.builder import Adapters, KeptWeights
from fastdeploy_core.layers.experts import ExpertRanks
from fastdeploy_core.models.ernie import Ernie4_5_MoeForCausalLM, Ernie4_5ForCausalLM
from fastdeploy_core.models.llama import LlamaForCausalLM
from fastdeploy_core.models.qwen import Qwen2ForCausalLM, Qwen3ForCausalLM, Qwen3MoeForCausalLM
from fastdeploy_core.plugins.kernels import ChosenKernels
from fastdeploy_core.plugins.resolved import ResolvedPlugins
from fastdeploy_core.reference.attention import ReferenceAttention
from fastdeploy_core.reference.device import CpuDevice
from fastdeploy_core.reference.moe import ReferenceMoE
from fastdeploy_core.sampling.processors import LogitBiasLogitsProcessor
from fastdeploy_core.scheduler.local import LocalScheduler
from fastdeploy_core.serving.asking import Plugins
from fastdeploy_core.serving.front.occupancy import OwnOccupancy
from fastdeploy_core.serving.openai.schemas.common import SamplingFields
from fastdeploy_core.types import SequenceExtras
from fastdeploy_core.types.worker import WorkerInfo
from fastdeploy_core.worker.worker import Worker
from fastdeploy_testing.check import main as check_plugin
from fastdeploy_testing.examine import main as examine_device
from fastdeploy_testing.fakes import FaultyDevice, NullDevice
from fastdeploy_testing.new import main as new_plugin

kv_stores: list[Callable[[Mapping[str, Any]], KVStore]] = [
    MyDiskStore,
    DiskStore,
    RedisStore,
]
kv_transports: list[Callable[[TransportOptions], KVTransport]] = [
    MyWireTransport,
    SharedMemoryTransport,
    TcpTransport,
    NixlTransport,
    MooncakeTransport,
    CudaIpcTransport,
]
expert_communicators: list[Callable[[ExpertGroup], ExpertCommunicator]] = [
    MyMeshExperts,
    LoopbackExperts,
    AllGatherExperts,
]
devices: list[Callable[[DeviceOptions], DeviceBackend]] = [
    CpuDevice,
    FaultyDevice,
    NullDevice,
    MyChipDevice,
    X86Device,
    CudaDevice,
    DcuDevice,
    GaudiDevice,
    GcuDevice,
    IluvatarDevice,
    MetaxDevice,
    XpuDevice,
]
schedulers: list[Callable[[RequestSchedulerConfig], RequestScheduler]] = [
    MyQueueScheduler,
    LocalScheduler,
    GlobalScheduler,
    SplitwiseScheduler,
]
attention: list[Callable[[AttentionSpec, int, DeviceBackend, KernelTable], AttentionBackend]] = [
    IndexedAttention,
    MyFlashAttention,
    ReferenceAttention,
    X86Attention,
    PagedAttention,
    LatentAttention,
    CudaIndexedAttention,
    QuantizedAttention,
    GaudiBlock,
    GcuAttention,
    IluvatarAttention,
    MetaxAttention,
    XpuAttention,
]
states: list[Callable[[StateSpec, int, DeviceBackend, KernelTable], StateBackend]] = [
    CudaStates,
    MyStatesStates,
    PlainStates,
]
moe: list[Callable[[MoESpec, DeviceBackend, KernelTable], MoEBackend]] = [
    MyExpertsMoE,
    ReferenceMoE,
    X86MoE,
    CudaMoE,
    GaudiMoE,
    XpuMoE,
]
adapted_moe: list[Callable[[MoESpec, DeviceBackend, KernelTable], AdaptedMoEBackend]] = [CudaMoE]
speculative: list[Callable[[DrafterContext], HostDrafter | DeviceDrafter]] = [
    DraftModel,
    NgramDrafter,
    SuffixDrafter,
    MyDraftDrafter,
    MTPDrafter,
    Eagle3Drafter,
    DFlashDrafter,
]
quantizers: list[Callable[[Mapping[str, Any], DeviceBackend, KernelTable], Quantizer]] = [
    Awq,
    BlockFp8,
    CompressedTensors,
    Gptq,
    Mxfp4,
    W4A8,
    W8A8,
    WFp8AFp8,
    WInt4,
    WInt8,
    MyFormatQuantizer,
    Tet2,
    Tet3,
    Tet4,
]
composed_quantizers: list[
    Callable[[Mapping[str, Any], DeviceBackend, KernelTable, FindQuantizer], ComposedQuantizer]
] = [
    GGUFQuantizer,
    MixedQuantizer,
    Wint2,
]
models: list[Callable[[Mapping[str, Any], ModelBuilder], CausalLM]] = [
    DeepseekV3ForCausalLM,
    DeepseekV32ForCausalLM,
    Ernie4_5ForCausalLM,
    Ernie4_5_MoeForCausalLM,
    CohereForCausalLM,
    Cohere2ForCausalLM,
    Cohere2MoeForCausalLM,
    Dots1ForCausalLM,
    Exaone4ForCausalLM,
    ExaoneMoeForCausalLM,
    HunYuanDenseV1ForCausalLM,
    HunYuanMoEV1ForCausalLM,
    HYV3ForCausalLM,
    Lfm2MoeForCausalLM,
    OlmoeForCausalLM,
    SeedOssForCausalLM,
    SolarOpenForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma4ForConditionalGeneration,
    Llama4ForConditionalGeneration,
    Mistral3ForConditionalGeneration,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeForConditionalGeneration,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma4ForCausalLM,
    Glm4ForCausalLM,
    Glm4MoeForCausalLM,
    Glm4MoeLiteForCausalLM,
    GlmForCausalLM,
    GlmMoeDsaForCausalLM,
    GptOssForCausalLM,
    GraniteForCausalLM,
    GraniteMoeForCausalLM,
    Llama4ForCausalLM,
    LlamaForCausalLM,
    MiniMaxM2ForCausalLM,
    MistralForCausalLM,
    MixtralForCausalLM,
    MyModelForCausalLM,
    NemotronHForCausalLM,
    Olmo2ForCausalLM,
    Olmo3ForCausalLM,
    Phi3ForCausalLM,
    Qwen2ForCausalLM,
    Qwen2MoeForCausalLM,
    Qwen3NextForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    SmolLM3ForCausalLM,
    GraniteMoeHybridForCausalLM,
    KimiLinearForCausalLM,
    Lfm2ForCausalLM,
    Qwen3ForCausalLM,
    Qwen3MoeForCausalLM,
]
multimodal: list[Callable[[Mapping[str, Any], ModelBuilder], MultimodalLM]] = [
    Ernie4_5_VLMoeForConditionalGeneration,
    PaddleOCRVLForConditionalGeneration,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeForConditionalGeneration,
]
pooling: list[Callable[[Mapping[str, Any], ModelBuilder], PoolingLM]] = [
    PooledLM,
]
checkpoint_formats: list[Callable[[Path], CheckpointFormat]] = [
    MySuffixCheckpoint,
    GGUFCheckpoint,
]
model_sources: list[Callable[[], ModelSource]] = [
    MyHubSource,
    AIStudio,
    HuggingFace,
    ModelScope,
]
reasoning_parsers: list[Callable[[str, Mapping[str, Any]], ReasoningParser]] = [
    MyThoughtsParser,
    CommandThinkParser,
    HunyuanThinkParser,
    SeedThinkParser,
    DeepSeekR1Parser,
    ErnieX1Parser,
    Gemma4ThinkParser,
    GraniteThinkParser,
    HarmonyReasoningParser,
    MistralThinkParser,
    ThinkParser,
]
tool_parsers: list[Callable[[Sequence[Any]], ToolParser]] = [
    DeepSeekToolParser,
    DeepSeekV32ToolParser,
    FunctionGemmaToolParser,
    Gemma4ToolParser,
    GlmToolParser,
    CommandToolParser,
    HunyuanToolParser,
    Lfm2ToolParser,
    Olmo3ToolParser,
    SeedOssToolParser,
    GraniteToolParser,
    HarmonyToolParser,
    HermesToolParser,
    KimiK2ToolParser,
    Llama3JsonToolParser,
    MiniMaxM2ToolParser,
    MistralToolParser,
    MyCallsParser,
    Phi4MiniToolParser,
    PythonicToolParser,
    QwenToolParser,
    TagToolParser,
]
grammars: list[Callable[[str, int, list[int]], GrammarBackend]] = [
    MyGrammarBackend,
    LLGuidanceBackend,
]
launchers: list[Callable[[Mapping[str, str]], Launcher]] = [
    LocalLauncher,
    MyClusterLauncher,
    RayLauncher,
    StaticLauncher,
]
commands: list[Command] = [
    mycommand,
    bench,
    quantize,
    check_plugin,
    examine_device,
    new_plugin,
    chat,
    complete,
    pull,
    router,
    run_batch,
    tokenizer,
    collect_env,
    launch,
    plugins_doctor,
    plugins_report,
    plugins_shapes,
    plugins_show,
    plugins_why,
]
logits_processors: list[Callable[[ProcessorContext], LogitsProcessor]] = [
    MyBiasProcessor,
    LogitBiasLogitsProcessor,
    ThinkingBudgetLogitsProcessor,
]
several_engines: list[Callable[[EngineConfig, Future[ResolvedPlugins], Listener], EngineLink]] = [
    engines
]
several_api_servers: list[
    Callable[[EngineConfig, ServerConfig, Plugins, socket.socket], FrontEnds]
] = [FrontEnds]
divided_experts: list[
    Callable[[EngineConfig, DeviceBackend, int, Communicator | None, None], ExpertRanks]
] = [expert_ranks]
captured_shapes: list[Callable[[str, ChosenKernels], None]] = [capture]
beam_llm: list[Callable[[LLM, Prompts, BeamSearchParams], list[BeamSearchOutput]]] = [beam_search]
beam_fields: list[Callable[[SamplingFields, Mapping[str, Any]], BeamSampling]] = [beam_sampling]
key_limits: list[Callable[[str, OwnOccupancy | None], KeyLimits]] = [KeyLimits]
shared_queue: list[Callable[[EngineLink, RequestScheduler, Listener], EngineLink]] = [SharedQueue]
weight_cache: list[Callable[[PackingDevice, Path], KeptWeights]] = [WeightCache]
adapters: list[Callable[[EngineConfig, DeviceBackend, KernelTable, type[Any]], Adapters]] = [
    AdapterLayers
]
adapter_request: list[Callable[[str, str, EngineConfig], SequenceExtras]] = [adapter_extras]
served_adapters: list[Callable[[EngineConfig], Mapping[str, SequenceExtras]]] = [ServedAdapters]
forced_tools: list[type[ForcedTools]] = [ForcedTools]
pooled_invocations: list[Callable[[Request], Awaitable[Response]]] = [invocations]
request_templates: list[Callable[[str, Mapping[str, Any]], str]] = [render_in_child]
rollout_engine: list[
    Callable[[EngineCore, RequestScheduler | None, Callable[[], None] | None], EngineControl]
] = [EngineControl]
routed_experts: list[Callable[[str, SequenceExtras | None], SequenceExtras]] = [routed_extras]
rollout_llm: list[Mapping[str, Callable[..., Any]]] = [METHODS]
rollout_worker: list[Callable[[EngineConfig, ResolvedPlugins, int, int, str], Worker]] = [
    RolloutWorker
]
weight_sources: list[Callable[[Mapping[str, Any], str], WeightSource]] = [Folder, SharedMemory]
kv_events: list[Callable[[KVEventsConfig, int, int, int], KVEvents]] = [KVEvents]
stored_blocks: list[
    Callable[
        [EngineConfig, list[WorkerInfo], CachePlan, Callable[[Mapping[str, Any]], KVStore]],
        StoredBlocks,
    ]
] = [StoredBlocks]
handovers: list[
    Callable[
        [EngineConfig, list[WorkerInfo], CachePlan, Callable[[TransportOptions], KVTransport]],
        Handovers,
    ]
] = [Handovers]
