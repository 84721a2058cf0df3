"""Build vLLM's engine for a worker: load the model, mend parts that do not work, describe it.

The engine core runs in this process (`LLMEngine` without its multiprocess client), so that tokens
that arrive with KV can be put into the text state of their request between two steps. With several
ranks vLLM's multiprocess executor runs the model; its processes end with this one.
"""

from __future__ import annotations

from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import TYPE_CHECKING, Any

import vllm
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor import Executor

from kv_transfer.vllm.connector import first_of, handshake_in
from kv_transfer.vllm.continuation import ContinuationsWithoutConnector
from kv_transfer.vllm.kv_layout import check_model
from pdserve.model.tokenizer import digest_of, read_files
from pdserve.types import EngineLimits, KvEndpoint, ModelInfo
from workers.engine import EngineInfo
from workers.vllm.images import tensors
from workers.vllm.patches.experts import mend_experts
from workers.vllm.patches.lora import mend_lora
from workers.vllm.patches.pipeline import mend_pipeline
from workers.vllm.patches.rotary import mend_rotary
from workers.vllm.patches.speculation import mend_sampling, unsupported_fields
from workers.vllm.ranks.lockstep import LockstepEngine
from workers.vllm.start.args import (
    is_cross_encoder,
    make_config,
    settings_in_effect,
    warn_of_cut_context,
)
from workers.vllm.start.tokenizer_files import path_for_router
from workers.vllm.step import routed_experts
from workers.vllm.step.scheduler_view import SchedulerView, view_of
from workers.vllm.step.totals import EngineTotals

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import ExitStack

    from vllm.config import VllmConfig

    from pdserve.types import RoutedExperts
    from workers.vllm.start.settings import VllmSettings


@dataclass(frozen=True, slots=True)
class OpenedEngine:
    """A loaded engine of vLLM, and its parts.

    - `group`: the same engine, if it is a rank of a data-parallel group
    - `view`: its scheduler with the connectors
    - `core`, `executor`: vLLM's EngineCore and Executor
    - `runner_half`: the half of our KV connector that runs with the model, if that is in this
      process
    - `encodes`: the engine is an encode worker's
    - `continuations`: takes in tokens that were generated elsewhere, if no KV connector does
    - `totals`: vLLM's counters since the start
    - `pickled_config`: the configuration, as vLLM gives it to processes
    - `set_for_model`: settings that the model required, each with the reason
    - `experts`: the shape of a token's experts, if requests can have them
    """

    engine: LLMEngine
    group: LockstepEngine | None
    view: SchedulerView
    core: Any
    executor: Any
    runner_half: Any
    encodes: bool
    continuations: ContinuationsWithoutConnector | None
    totals: EngineTotals
    pickled_config: bytes
    set_for_model: Mapping[str, str]
    experts: RoutedExperts | None


def open_engine(settings: VllmSettings, wake: Callable[[], None], stack: ExitStack) -> OpenedEngine:
    """Load the model and mend vLLM. `stack` ends the engine. `wake` is called, on any thread, when
    another rank of the group needs a step. Raises ConfigError, or what vLLM raises."""
    # The context's defaults suit a server.
    context = UsageContext.OPENAI_API_SERVER
    config, set_for_model = make_config(settings, context)
    has_kv = settings.kv is not None and not settings.encodes
    if has_kv:
        check_model(config)
    pickled_config = bytes(ForkingPickler.dumps(config))  # with the engine, it will hold the model
    totals, group = EngineTotals(), None
    loggers = [lambda *_: totals]
    if config.parallel_config.data_parallel_size > 1:
        engine = group = LockstepEngine(config, settings, context, wake, loggers)
    else:
        engine = LLMEngine(
            config,
            Executor.get_class(config),
            log_stats=True,
            usage_context=context,
            stat_loggers=loggers,
        )
    stack.callback(engine.engine_core.shutdown)
    if group is not None:
        stack.callback(group.links.close)
    warn_of_cut_context(config)
    core = engine.engine_core.engine_core
    executor = core.model_executor
    if current_platform.is_cpu():
        _mend(config, executor)
    is_here = has_kv and has_kv_transfer_group()
    experts = None
    if settings.engine_args.get(routed_experts.ARGUMENT):
        routed_experts.ExpertsByRequest(core.scheduler)
        experts = executor.collective_rpc(routed_experts.capture_in)[0]
    return OpenedEngine(
        engine=engine,
        group=group,
        view=view_of(core.scheduler, settings),
        core=core,
        executor=executor,
        runner_half=first_of(get_kv_transfer_group()) if is_here else None,
        encodes=settings.encodes,
        continuations=None if has_kv else ContinuationsWithoutConnector(core.scheduler, executor),
        totals=totals,
        pickled_config=pickled_config,
        set_for_model=set_for_model,
        experts=experts,
    )


def _mend(config: VllmConfig, executor: Executor) -> None:
    """Replace parts of vLLM's CPU build that do not work, where the model runs."""
    parallel = config.parallel_config
    if config.model_config.use_mla:
        executor.collective_rpc(mend_rotary)
    if config.speculative_config is not None:
        executor.collective_rpc(mend_sampling)
    if config.lora_config is not None:
        executor.collective_rpc(mend_lora)
    if parallel.pipeline_parallel_size > 1:
        executor.collective_rpc(mend_pipeline)
    if parallel.data_parallel_size > 1 or parallel.enable_expert_parallel:
        executor.collective_rpc(mend_experts)


def describe(opened: OpenedEngine, settings: VllmSettings, directory: Path) -> EngineInfo:
    """Return what the worker registers with. Tokenizer files that a router cannot read otherwise
    are written to `directory`."""
    config = opened.engine.vllm_config
    model, is_cpu = config.model_config, config.device_config.device_type == "cpu"
    chosen = "; ".join(f"{name}: {why}" for name, why in opened.set_for_model.items())
    for_model = {"set_for_model": chosen} if chosen else {}
    path = path_for_router(opened.engine.get_tokenizer(), Path(model.tokenizer), directory)
    return EngineInfo(
        name=f"vllm {vllm.__version__}",
        model=ModelInfo(
            name=settings.model_names[0],
            path=str(path),
            max_model_len=model.max_model_len,
            vocab_size=model.get_vocab_size(),
            dtype=str(model.dtype).removeprefix("torch."),
            aliases=settings.model_names[1:],
            sampling_defaults=model.get_diff_sampling_param(),
            tokenizer=digest_of(read_files(path)),
            cross_encoder=is_cross_encoder(model),
            modalities=tensors.limits_of(opened.engine),
        ),
        block_size=config.cache_config.block_size,
        # Less the null block, which is all that a model without a KV cache has.
        total_blocks=max(1, int(config.cache_config.num_gpu_blocks) - 1),
        limits=EngineLimits(
            config.scheduler_config.max_num_seqs,
            config.scheduler_config.max_num_batched_tokens,
            config.lora_config.max_loras if config.lora_config else 0,
        ),
        kv=_kv_endpoint(opened),
        settings=settings_in_effect(config) | for_model,
        unsupported_fields=(
            *unsupported_fields(
                speculates=config.speculative_config is not None,
                is_runner_v1_on_gpu=not (is_cpu or config.use_v2_model_runner),
            ),
            *(("routed_experts",) if opened.experts is None else ()),
        ),
        device="cpu" if is_cpu else current_platform.get_device_name(),
        gpus=0 if is_cpu else config.parallel_config.world_size,
    )


def _kv_endpoint(opened: OpenedEngine) -> KvEndpoint | None:
    if opened.encodes:
        features = opened.view.features
        plane = features.plane
        return KvEndpoint(
            addresses=(plane.address,),
            compatibility=plane.compatibility,
            layout=plane.layout,
            transports=plane.transports,
            embedding_bytes=features.row_bytes,
        )
    if opened.view.connector is None:
        return None
    first = opened.executor.collective_rpc(handshake_in)[0]
    return KvEndpoint(
        addresses=opened.view.connector.addresses,
        compatibility=first.compatibility,
        layout=dict(first.layout),
        transports=tuple(first.transports),
        stage_layers=first.stage_layers,
        copies=True,
    )
