"""Creates the configured engine. vllm is imported only for its own engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import structs

from kv_transfer.settings import ConnectorConfig
from pdserve.config import MOVE_S, TiersConfig, TlsConfig
from pdserve.errors import ConfigError
from pdserve.model.hub import with_directories
from pdserve.model.tokenizer import digest_of, read_files
from pdserve.types import ModelInfo, Role
from workers.engine import ignore_progress
from workers.vllm.start.defaults import args_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.config import WorkerConfig
    from workers.engine import Engine
    from workers.vllm.start.settings import VllmSettings


_WITH_HANDOFF = (Role.PREFILL, Role.DECODE, Role.ENCODE)
_WITHOUT_TIERS = (Role.DECODE, Role.POOLING, Role.ENCODE)


def make_engine(
    config: WorkerConfig, instance_id: str, on_progress: Callable[[str], None] = ignore_progress
) -> Engine:
    """Create the configured engine, not started. It reports the steps of its start by
    `on_progress`, on any thread. Raises ConfigError naming the key at fault."""
    config = with_directories(config)
    if config.engine == "fake":
        return _make_fake(config, instance_id)
    from workers.vllm.engine import VllmEngine

    return VllmEngine(vllm_settings(config, instance_id), on_progress)


def vllm_settings(config: WorkerConfig, instance_id: str = "") -> VllmSettings:
    """Return the settings of vLLM for a model whose directories are known. Nodes other than the
    first need no `instance_id`. Raises ConfigError."""
    from workers.vllm.start.settings import VllmSettings

    kv = _connector_config(config)
    engine_args = {**args_of(config.compilation), **config.engine_args}
    if config.adapters:
        engine_args["enable_lora"] = True
    if config.role is Role.POOLING:
        # vLLM knows which models of this kind have a KV cache that can keep prefixes, and which
        # must see a prompt in one step, however long.
        own = ("enable_prefix_caching", "enable_chunked_prefill", "max_num_batched_tokens")
        engine_args = {**dict.fromkeys(own), **engine_args, "runner": "pooling"}
    return VllmSettings(
        model_path=config.model,
        model_names=config.served_names,
        threads=None if config.gpus else len(config.cores) or None,
        kv=kv,
        instance_id=instance_id,
        encodes=config.role is Role.ENCODE,
        # Decode workers get KV from prefill workers.
        tiers=TiersConfig() if config.role in _WITHOUT_TIERS else config.kv.tiers,
        retention=config.retention,
        engine_args=engine_args,
        nodes=config.nodes,
        data_parallel=config.data_parallel,
        host=config.host,
        leave_s=config.drain_timeout_s + MOVE_S,
    )


def _connector_config(config: WorkerConfig) -> ConnectorConfig | None:
    """Return the configuration of the KV plane; None for a role that transfers no KV."""
    if config.role not in _WITH_HANDOFF:
        return None
    access = config.access
    tls = access.tls if access.tls.is_mutual else TlsConfig()
    return ConnectorConfig(
        **{**structs.asdict(config.kv), "tiers": TiersConfig()},
        token_file=access.worker_token_file,
        tls_cert_file=tls.cert_file,
        tls_key_file=tls.key_file,
        tls_ca_file=tls.ca_file,
        require_auth=access.require_auth,
    )


def _make_fake(config: WorkerConfig, instance_id: str) -> Engine:
    from workers.fake.engine import FakeEngine
    from workers.fake.settings import settings_from_args

    for key, is_set in (("tiers", config.kv.tiers.host_gib), ("tls", config.kv.tls)):
        if is_set:
            raise ConfigError(f"kv.{key}: the fake engine has none", field=f"kv.{key}")
    path = Path(config.model, "config.json")
    try:
        values: dict[str, Any] = json.loads(path.read_text())
        name, *aliases = config.served_names
        model = ModelInfo(
            name=name,
            path=config.model,
            max_model_len=int(values["max_position_embeddings"]),
            vocab_size=int(values["vocab_size"]),
            dtype=str(values.get("dtype", values.get("torch_dtype", "auto"))),
            aliases=tuple(aliases),
            tokenizer=digest_of(read_files(Path(config.model))),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"model: {path} has no vocab_size or max_position_embeddings", field="model"
        ) from error
    settings = settings_from_args(config.engine_args)
    kv = _connector_config(config)
    return FakeEngine(model, settings, kv, instance_id, retention=config.retention)
