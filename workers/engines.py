"""Creates the configured engine. vllm is imported only for its own engine."""

from __future__ import annotations

import json
from importlib.util import find_spec
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

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.config import WorkerConfig
    from workers.engine import Engine
    from workers.vllm.settings import VllmSettings


_WITH_HANDOFF = (Role.PREFILL, Role.DECODE, Role.ENCODE)
_WITHOUT_TIERS = (Role.DECODE, Role.POOLING, Role.ENCODE)


def make_engine(
    config: WorkerConfig, instance_id: str, on_progress: Callable[[str], None] = ignore_progress
) -> Engine:
    """Make the configured engine, not started. It says by `on_progress` what its start does, on any
    thread. Raises ConfigError naming the key at fault."""
    config = with_directories(config)
    if config.engine == "fake":
        return _make_fake(config, instance_id)
    from workers.vllm.engine import VllmEngine

    return VllmEngine(vllm_settings(config, instance_id), on_progress)


def vllm_settings(config: WorkerConfig, instance_id: str = "") -> VllmSettings:
    """Return the settings of vLLM for a model whose directories are known; those of a node other
    than the first need no `instance_id`. Raises ConfigError."""
    from workers.vllm.settings import DataParallel, Nodes, VllmSettings

    kv = _connector_config(config)
    if kv is not None and kv.connector == "nixl" and find_spec("nixl") is None:
        raise ConfigError("kv.connector: the package nixl is missing", field="kv.connector")
    if config.role is Role.ENCODE and config.kv.connector != "pdserve":
        raise ConfigError("kv.connector: must be pdserve to encode", field="kv.connector")
    engine_args = dict(config.engine_args)
    if config.adapters:
        engine_args["enable_lora"] = True
    if config.role is Role.POOLING:
        # vLLM knows which models of this kind have a KV cache that can keep prefixes.
        engine_args = {"enable_prefix_caching": None, **engine_args, "runner": "pooling"}
    return VllmSettings(
        model_path=config.model,
        model_names=config.served_names,
        threads=None if config.gpus else len(config.cores) or None,
        kv=kv,
        instance_id=instance_id,
        encodes=config.role is Role.ENCODE,
        # Decode workers get KV from prefill workers.
        tiers=TiersConfig() if config.role in _WITHOUT_TIERS else config.kv.tiers,
        session_lease=config.session_lease,
        engine_args=engine_args,
        nodes=Nodes(
            count=config.nnodes,
            rank=config.node_rank,
            master_addr=config.master_addr,
            master_port=config.master_port,
            host=config.host,
        ),
        group=DataParallel(
            size=config.data_parallel_size,
            rank=config.data_parallel_rank,
            address=config.data_parallel_address,
            host=config.host,
            port=config.data_parallel_port,
            leave_s=config.drain_timeout_s + MOVE_S,
        ),
    )


def _connector_config(config: WorkerConfig) -> ConnectorConfig | None:
    """Return the configuration of the KV plane; None for a role that hands over no KV."""
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
    )


def _make_fake(config: WorkerConfig, instance_id: str) -> Engine:
    from workers.fake.engine import FakeEngine
    from workers.fake.settings import settings_from_args

    if config.kv.connector != "pdserve":
        raise ConfigError(
            f"kv.connector: the fake engine has no {config.kv.connector}", field="kv.connector"
        )
    if config.kv.tiers.host_gib:
        raise ConfigError("kv.tiers: the fake engine has none", field="kv.tiers")
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
    kv, lease = _connector_config(config), config.session_lease
    return FakeEngine(model, settings, kv, instance_id, session_lease=lease)
