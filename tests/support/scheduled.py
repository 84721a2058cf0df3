"""vLLM's own scheduler without a model, with steps in flight as on a GPU."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import torch
from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)
from vllm.usage.usage_lib import UsageContext
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from kv_transfer.settings import ConnectorConfig
from tests.support.engines import settings
from tests.support.tiny_models import ModelSpec, make_model
from workers.vllm.start.args import make_config

if TYPE_CHECKING:
    from pathlib import Path

    from vllm.config import VllmConfig
    from vllm.v1.outputs import KVConnectorOutput

    from kv_transfer.vllm.params import TransferParams


def scheduler_config(directory: Path) -> VllmConfig:
    """Return the configuration of an engine with our connector, and a tiny model written to
    `directory`."""
    model = make_model(directory, ModelSpec())
    args = settings(model, kv=ConnectorConfig(), instance_id="d", enable_prefix_caching=False)
    made, _ = make_config(args, UsageContext.LLM_CLASS)
    made.scheduler_config.async_scheduling = True
    made.cache_config.num_gpu_blocks = 64
    return made


class ScheduledEngine:
    """vLLM's scheduler, and the steps in flight. The model samples token 5."""

    def __init__(self, config: VllmConfig) -> None:
        spec: Any = FullAttentionSpec(32, num_kv_heads=2, head_size=64, dtype=torch.float32)
        caches = KVCacheConfig(64, [], [KVCacheGroupSpec(["layer"], spec)])
        self.scheduler = AsyncScheduler(config, caches, StructuredOutputManager(config), 32)
        self._flying: deque[Any] = deque()

    def add(self, request_id: str, kv: TransferParams | None = None, max_tokens: int = 20) -> None:
        params = SamplingParams(max_tokens=max_tokens)
        params.extra_args = {"kv_transfer_params": kv.to_dict()} if kv else None
        self.scheduler.add_request(Request(request_id, list(range(40)), params, None))

    def launch(self) -> set[str]:
        """Schedule a step. Return the requests in it."""
        output = self.scheduler.schedule()
        self._flying.append(output)
        return set(output.num_scheduled_tokens)

    def end_step(self, kv: KVConnectorOutput | None = None) -> None:
        """End the oldest step, which reports `kv`."""
        output = self._flying.popleft()
        names = list(output.num_scheduled_tokens)
        made = ModelRunnerOutput(names, {x: n for n, x in enumerate(names)}, [[5] for _ in names])
        made.kv_connector_output = kv
        self.scheduler.update_from_output(output, made)

    @property
    def metadata(self) -> Any:
        """What the connector sends with the step that was scheduled last."""
        return self._flying[-1].kv_connector_metadata

    @property
    def free_blocks(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())


class SlowTier(KVConnectorBase_V1, SupportsHMA):
    """The scheduler half of a tier that has one block of each prompt, and loads it in a later
    step."""

    def get_num_new_matched_tokens(self, request: Any, computed: int) -> tuple[int, bool]:
        return (32, True) if computed == 0 else (0, False)

    def update_state_after_alloc(self, request: Any, blocks: Any, external: int) -> None:
        pass

    def build_connector_meta(self, _output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        """Return that nothing is sent, as vLLM's OffloadingConnector does."""
        return False, None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        raise NotImplementedError

    def wait_for_layer_load(self, layer_name: str) -> None:
        raise NotImplementedError

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **_: Any) -> None:
        raise NotImplementedError

    def wait_for_save(self) -> None:
        raise NotImplementedError
