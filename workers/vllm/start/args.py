"""Conversion of our settings to vLLM's engine arguments."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from importlib.metadata import version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import msgspec
import torch
import vllm
from pydantic import TypeAdapter, ValidationError
from vllm.config import ECTransferConfig, KVTransferConfig
from vllm.engine.arg_utils import EngineArgs, get_type_hints
from vllm.platforms import current_platform

from pdserve.config import ranks_of
from pdserve.errors import ConfigError
from pdserve.process.gpus import check_machine
from pdserve.process.memory import cpu_cache_bytes
from workers.vllm.cache.events import events_config
from workers.vllm.patches.speculation import check_packages
from workers.vllm.start.defaults import CPU_DEFAULTS, DEFAULTS
from workers.vllm.start.settings import memory_left_to_kv
from workers.vllm.step.routed_experts import ARGUMENT, check_captures

if TYPE_CHECKING:
    from dataclasses import Field

    from vllm.config import ModelConfig, VllmConfig
    from vllm.usage.usage_lib import UsageContext

    from pdserve.config import TiersConfig
    from workers.vllm.start.settings import VllmSettings

logger = logging.getLogger(__name__)

# Limit of LoRA adapters in an engine's host memory. It accepts no more, so that it never reads an
# adapter's files again, which may have changed.
_MAX_CPU_LORAS = 32

# The version with which all tests run, on CPUs. docs/versions.md has the others.
_TESTED_VLLM = "0.32.0"

_MAMBA2_DIMENSIONS = 3  # heads, size of a head, size of a state

_TIERS = "kv_transfer.vllm.tiers"


def kv_transfer_config(settings: VllmSettings) -> KVTransferConfig | None:
    """Return the configuration of the connectors; the one for hand-over is first."""
    connectors = []
    kv, tiers = settings.kv, settings.tiers
    if settings.encodes:
        return None
    if kv is not None:
        extra = msgspec.to_builtins(kv)
        connectors.append(_connector("PdConnector", "kv_transfer.vllm.connector", extra))
    if tiers.host_gib:
        connectors.append(_connector("TierConnector", _TIERS, _tier_config(tiers)))
    if len(connectors) > 1:
        connectors = [_connector("TieredConnector", _TIERS, {"connectors": connectors})]
    engine_id = None if kv is None else settings.instance_id
    return KVTransferConfig(**connectors[0], engine_id=engine_id) if connectors else None


def _connector(name: str, module: str, extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of one connector. A failed load must fail its request, because if
    vLLM computed it again, the first token would be sampled twice."""
    return {
        "kv_connector": name,
        "kv_connector_module_path": module,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": dict(extra),
    }


def ec_transfer_config(settings: VllmSettings, role: str) -> ECTransferConfig:
    """Return the configuration of the connector of embeddings, for vLLM's `role`."""
    return ECTransferConfig(
        ec_connector="PdEcConnector",
        ec_connector_module_path="kv_transfer.vllm.ec_connector",
        ec_role=role,
        engine_id=settings.instance_id,
        ec_connector_extra_config=msgspec.to_builtins(settings.kv),
    )


def _tier_config(tiers: TiersConfig) -> dict[str, Any]:
    disk: dict[str, Any] = {"type": "DiskTier", "module_path": _TIERS, "root": tiers.disk_path}
    disk["quota_bytes"] = int(tiers.disk_gib * 2**30)
    return {
        "spec_name": "TierSpec",
        "spec_module_path": _TIERS,
        "cpu_bytes_to_use": int(tiers.host_gib * 2**30),
        "secondary_tiers": [disk] if tiers.disk_path else [],
        "pid": os.getpid(),
    }


def engine_args(settings: VllmSettings) -> EngineArgs:
    """Return vLLM's engine arguments. Raises ConfigError naming an unknown one."""
    known = {f.name: f for f in fields(EngineArgs)}
    args = {**DEFAULTS, **(CPU_DEFAULTS if current_platform.is_cpu() else {})}
    for name, value in settings.engine_args.items():
        if name == ARGUMENT:
            continue  # vLLM's own way needs its model runner V2, and refuses P/D
        if name not in known:
            raise ConfigError(
                f"engine_args.{name} is not an engine argument of this vLLM",
                field=f"engine_args.{name}",
            )
        args[name] = _as_vllm_has_it(known[name], value)
    if args.get("enable_lora"):
        args.setdefault("max_cpu_loras", max(_MAX_CPU_LORAS, args.get("max_loras", 1)))
    if settings.tiers.host_gib and not args["enable_prefix_caching"]:
        raise ConfigError(
            "engine_args.enable_prefix_caching must be true: kv.tiers keeps prefixes",
            field="engine_args.enable_prefix_caching",
        )
    if settings.encodes:
        if ranks_of(args) > 1:
            raise ConfigError("an encode worker has one rank", field="tensor_parallel_size")
        args["enable_prefix_caching"] = False  # there is no KV cache
    check_packages(args.get("speculative_config") or {})
    if current_platform.is_cpu():
        args.setdefault("worker_cls", "workers.vllm.patches.cpu_worker.RankOnCpu")
    if current_platform.is_cpu() and "kv_cache_memory_bytes" not in args:
        size = cpu_cache_bytes(settings.model_path, settings.threads)
        args["kv_cache_memory_bytes"] = size // ranks_of(args)  # vLLM's is per rank
    if settings.kv is not None and not current_platform.is_cpu():
        total_bytes = current_platform.get_device_total_memory()
        args |= memory_left_to_kv(settings.kv, args, total_bytes, EngineArgs.gpu_memory_utilization)
    embeddings = ec_transfer_config(settings, "ec_producer") if settings.encodes else None
    return EngineArgs(
        model=settings.model_path,
        served_model_name=list(settings.model_names),
        disable_log_stats=False,
        distributed_executor_backend="mp" if ranks_of(args) > 1 else "uni",
        nnodes=settings.nodes.count,
        node_rank=settings.nodes.rank,
        master_addr=settings.nodes.address or EngineArgs.master_addr,
        master_port=settings.nodes.port,
        kv_transfer_config=kv_transfer_config(settings),
        ec_transfer_config=embeddings,
        kv_events_config=events_config(enabled=bool(args["enable_prefix_caching"])),
        # vLLM's cache would treat the fields that a decode worker gets as the whole image.
        mm_processor_cache_gb=0,
        **args,
    )


def make_config(settings: VllmSettings, context: UsageContext) -> tuple[VllmConfig, dict[str, str]]:
    """Return (configuration of an engine, reason by engine argument that the model needs changed
    from our default). Raises ConfigError and vLLM's errors."""
    if torch.version.cuda is not None and not current_platform.is_cpu():
        check_machine(torch.version.cuda)
    if (installed := vllm.__version__.partition("+")[0]) != _TESTED_VLLM:
        logger.warning(
            "this is vLLM %s; pdserve is tested with %s: see docs/vllm.md", installed, _TESTED_VLLM
        )
    config = _config_of(settings, context)
    needs = needs_on_cpu(config) if current_platform.is_cpu() else []
    if not needs:
        return config, {}
    for need in needs:
        # "auto" means our choice.
        if settings.engine_args.get(need.argument, "auto") not in ("auto", need.value):
            refused(need)
        if need.argument == "enable_prefix_caching" and settings.tiers.host_gib:
            raise ConfigError(f"kv.tiers.host_gib must be 0 {need.reason}", field="kv.tiers")
        logger.info("%s is set to %s", need.argument, need)
    own = {need.argument: need.value for need in needs}
    args = {**settings.engine_args, **own}
    config = _config_of(replace(settings, engine_args=args), context)
    return config, {need.argument: str(need) for need in needs}


def _config_of(settings: VllmSettings, context: UsageContext) -> VllmConfig:
    args = engine_args(settings)
    if settings.data_parallel.size > 1:
        _check_group(args)
    try:
        config = args.create_engine_config(context)
        _check_stages(config)
        if settings.engine_args.get(ARGUMENT):
            check_captures(config)
        hands_over = settings.kv is not None and not settings.encodes
        if hands_over and config.model_config.is_multimodal_model:
            # Set only now, because a model without images must not have the connector.
            config.ec_transfer_config = ec_transfer_config(settings, "ec_consumer")
        return config
    except ValueError as error:
        if find_spec("torchvision") or "failed to be inspected" not in str(error):
            raise
        raise ConfigError(
            f"model: vLLM's code of {args.model} needs torchvision, in the build that fits torch "
            f"{version('torch')}",
            field="model",
        ) from error


def _check_group(args: EngineArgs) -> None:
    """Raise ConfigError for a model that ranks of a data-parallel group cannot share."""
    if not args.create_model_config().is_moe:
        raise ConfigError(
            "data_parallel.size must be 1: the model has no experts to share; set `workers`",
            field="data_parallel.size",
        )
    if current_platform.is_cpu() and not args.enforce_eager:
        raise ConfigError(
            "engine_args.enforce_eager must be true with data_parallel.size above 1 on a CPU",
            field="engine_args.enforce_eager",
        )


def _check_stages(config: VllmConfig) -> None:
    """Raise ConfigError for speculation on pipeline stages. Only the last stage of vLLM's model
    runner V1 makes a drafter, which every stage uses."""
    stages = config.parallel_config.pipeline_parallel_size
    if stages > 1 and config.speculative_config is not None and not config.use_v2_model_runner:
        raise ConfigError(
            f"engine_args.speculative_config cannot be set with pipeline_parallel_size {stages}: "
            "vLLM's model runner V1 has no speculation on pipeline stages",
            field="engine_args.speculative_config",
        )


def _as_vllm_has_it(field: Field[Any], value: object) -> object:
    """Convert a mapping to vLLM's class for the argument, if there is one."""
    kinds: list[Any] = [kind for kind in get_type_hints(field.type) if is_dataclass(kind)]
    if not kinds or not isinstance(value, Mapping):
        return value
    try:
        return TypeAdapter(kinds[0]).validate_python(value)
    except ValidationError as error:
        name = f"engine_args.{field.name}"
        raise ConfigError(f"{name}: {error}", field=name) from error


def settings_in_effect(config: VllmConfig) -> dict[str, str]:
    """Return the settings that affect the engine's speed, as vLLM has resolved them."""
    scheduler, compilation = config.scheduler_config, config.compilation_config
    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    found = {
        "enable_chunked_prefill": scheduler.enable_chunked_prefill,
        "async_scheduling": scheduler.async_scheduling,
        "enable_prefix_caching": cache.enable_prefix_caching,
        "cache_dtype": cache.cache_dtype,
        "quantization": model.quantization,
        "enforce_eager": model.enforce_eager,
        "compilation_mode": getattr(compilation.mode, "name", compilation.mode),
        "cudagraph_mode": getattr(compilation.cudagraph_mode, "name", compilation.cudagraph_mode),
        "tensor_parallel_size": parallel.tensor_parallel_size,
        "data_parallel_size": parallel.data_parallel_size,
        "enable_expert_parallel": parallel.enable_expert_parallel,
        "pipeline_parallel_size": parallel.pipeline_parallel_size,
        "speculative_config": getattr(config.speculative_config, "method", None),
        "device": config.device_config.device_type,
        "device_name": current_platform.get_device_name(),
    }
    return {name: str(value) for name, value in found.items()}


class Need(NamedTuple):
    """An engine argument without which the prompts of a model would end the engine."""

    argument: str
    value: object
    reason: str

    def __str__(self) -> str:
        value = str(self.value).lower() if isinstance(self.value, bool) else self.value
        return f"{value} {self.reason}"


def needs_on_cpu(config: VllmConfig) -> list[Need]:
    """Return the arguments that a model needs on a CPU and `config` lacks. The gated delta net of
    vLLM 0.32 supports only bfloat16. Prefix caching of a Mamba-2 model needs states from the middle
    of a prompt, which its CPU kernel does not return. On CPUs with AMX vLLM selects AMX_MLA for any
    model with MLA, but that supports only bfloat16, and transfers of its KV are untested."""
    model = config.model_config
    needs = []
    has_amx = torch.cpu._is_amx_tile_supported()
    if model.use_mla and has_amx and config.attention_config.backend is None:
        needs.append(Need("attention_backend", "CPU_MLA", "for the MLA of this model on a CPU"))
    if config.parallel_config.enable_expert_parallel and model.quantization:
        # workers/vllm/patches/experts.py patches only the kernel without quantization
        needs.append(Need("enable_expert_parallel", False, "for a quantized model on a CPU"))
    if needs:
        return needs
    if hasattr(model.hf_text_config, "linear_key_head_dim"):  # a gated delta net
        if str(model.dtype) == "torch.bfloat16":
            return []
        return [Need("dtype", "bfloat16", "for the gated delta net of this model on a CPU")]
    if config.cache_config.mamba_cache_mode != "align":
        return []
    model_class, _ = model.registry.resolve_model_cls(model.architecture, model_config=model)
    shapes = model_class.get_mamba_state_shape_from_config(config)
    if any(len(shape) == _MAMBA2_DIMENSIONS for shape in shapes):
        return [Need("enable_prefix_caching", False, "for Mamba-2 layers on a CPU")]
    return []


def refused(need: Need) -> NoReturn:
    """Raise ConfigError for an argument that was set to another value."""
    name = f"engine_args.{need.argument}"
    raise ConfigError(f"{name} must be {need}", field=name)


def is_cross_encoder(model: ModelConfig) -> bool:
    """Return whether a pooling model scores pairs of texts. Raise ConfigError unless it embeds, or
    scores pairs that its tokenizer joins with one number."""
    if model.runner_type != "pooling" or model.score_type == "bi-encoder":
        return False
    is_single = getattr(model.hf_config, "num_labels", 0) == 1
    if model.score_type == "cross-encoder" and is_single and model.use_sep_token:
        return True
    raise ConfigError(
        f"model: {model.architecture} is not supported: pooling workers serve models that embed, "
        "and cross-encoders with one label whose tokenizer joins pairs of texts",
        field="model",
    )


def warn_of_cut_context(config: VllmConfig) -> None:
    """Log a line if the KV cache does not hold the model's whole context."""
    model, cache = config.model_config, config.cache_config
    size = cache.kv_cache_memory_bytes
    held = f"{size >> 20} MiB" if size else f"{cache.num_gpu_blocks or 0} blocks"
    whole = getattr(model.hf_text_config, "max_position_embeddings", 0)
    if model.original_max_model_len == -1 and model.max_model_len < whole:
        logger.warning(
            "context cut from %d to %d tokens: the KV cache has %s; "
            "worker.engine_args.kv_cache_memory_bytes sets its size",
            whole,
            model.max_model_len,
            held,
        )
