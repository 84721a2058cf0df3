"""Creates the configured engine. vllm is imported only for its own engine."""

from __future__ import annotations

import json
import math
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from pdserve.config import TiersConfig
from pdserve.errors import ConfigError
from pdserve.hub import with_directories
from pdserve.tokenizer import digest_of, read_files
from pdserve.types import ModelInfo, Role
from workers.engine import ignore_progress

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.config import AccessConfig, KvConfig, WorkerConfig
    from workers.engine import Engine
    from workers.vllm.settings import VllmSettings


_WITHOUT_TIERS = (Role.DECODE, Role.POOLING)


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
    from workers.vllm.settings import KvSettings, Nodes, VllmSettings

    engine_args, kv = dict(config.engine_args), None
    if config.adapters:
        engine_args["enable_lora"] = True
    if config.role is Role.POOLING:
        # vLLM knows which models of this kind have a KV cache that can keep prefixes.
        engine_args = {"enable_prefix_caching": None, **engine_args, "runner": "pooling"}
    elif config.role is not Role.AGGREGATED:
        extra = connector_config(config.kv, config.access)
        kv = KvSettings(instance_id, extra, config.kv.connector, config.kv.host)
    return VllmSettings(
        model_path=config.model,
        model_names=config.served_names,
        threads=None if config.gpus else len(config.cores) or None,
        kv=kv,
        # Decode workers get KV from prefill workers.
        tiers=TiersConfig() if config.role in _WITHOUT_TIERS else config.kv.tiers,
        engine_args=engine_args,
        nodes=Nodes(
            *(config.nnodes, config.node_rank, config.master_addr, config.master_port, config.host)
        ),
    )


def connector_config(kv: KvConfig, access: AccessConfig) -> dict[str, Any]:
    """Return the connector's own configuration. Raises ConfigError if it is not installed."""
    if kv.connector == "nixl":
        if find_spec("nixl") is None:
            raise ConfigError("kv.connector: the package nixl is missing", field="kv.connector")
        return {"kv_lease_duration": math.ceil(kv.lease_s)}
    keys = msgspec.structs.asdict(kv)
    extra = {name: value for name, value in keys.items() if name not in ("connector", "tiers")}
    if access.worker_token_file:
        extra["token_file"] = str(access.worker_token_file)
    if access.tls.is_mutual:
        extra |= {
            "tls_cert_file": str(access.tls.cert_file),
            "tls_key_file": str(access.tls.key_file),
            "tls_ca_file": str(access.tls.ca_file),
        }
    return extra


def _make_fake(config: WorkerConfig, instance_id: str) -> Engine:
    from workers.fake.engine import FakeEngine
    from workers.fake.settings import FakeKv, settings_from_args

    kv = None
    if config.kv.connector != "pdserve":
        raise ConfigError(
            f"kv.connector: the fake engine has no {config.kv.connector}", field="kv.connector"
        )
    if config.kv.tiers.host_gib:
        raise ConfigError("kv.tiers: the fake engine has none", field="kv.tiers")
    if config.role in (Role.PREFILL, Role.DECODE):
        kv = FakeKv(instance_id, host=config.kv.host, lease_s=config.kv.lease_s)
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
    return FakeEngine(model, settings_from_args(config.engine_args, kv=kv))
