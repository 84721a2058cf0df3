"""The KV connector that vLLM loads (`kv_connector_module_path="kv_transfer.vllm.connector"`).

Tried on vLLM 0.32.0 and 0.33.0 (CPU).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed import get_world_group
from vllm.distributed import utils as vllm_utils
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.outputs import KVConnectorOutput

from kv_transfer import transport
from kv_transfer.cache.geometry import compatibility
from kv_transfer.cache.host_memory import SharedMemory
from kv_transfer.protocol.peers import Peers
from kv_transfer.protocol.snapshot import take
from kv_transfer.protocol.transport import LocalKv
from kv_transfer.settings import read_extra_config
from kv_transfer.vllm.continuation import patch_runner_v1
from kv_transfer.vllm.kv_groups import groups_of, joined, of_all_stages, tables_of
from kv_transfer.vllm.kv_layout import (
    allocate_in,
    check_model,
    cooperative_kernels,
    describe,
    has_draft_kv,
    held_of,
    plan_of,
    regions_of,
)
from kv_transfer.vllm.scheduler_half import SchedulerHalf
from kv_transfer.vllm.step import Arrival, PdHandshake, StepMetadata, WorkerOutput
from kv_transfer.vllm.worker_half import WorkerHalf
from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from contextlib import AbstractContextManager

    import torch
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

    from kv_transfer.protocol.snapshot import KvSnapshot
    from kv_transfer.protocol.transport import Transport
    from pdserve.types import ErrorInfo, KvLedger

# Some attention kernels need larger blocks split into smaller ones. vLLM cannot split them if other
# layers lie between a layer's blocks.
_MAX_UNSPLIT = 64


class PdConnector(KVConnectorBase_V1, SupportsHMA):
    """Forwards vLLM's calls to the scheduler half or the worker half, by `role`.

    A request's transfer is described by its kv_transfer_params (params.py). With SupportsHMA, vLLM
    keeps a block table for each KV-cache group.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        check_model(vllm_config)
        if self._kv_transfer_config.kv_load_failure_policy != "fail":
            # With "recompute", a handed-over first token would be sampled twice.
            raise ConfigError(
                'kv_load_failure_policy must be "fail"', field="kv_load_failure_policy"
            )
        if vllm_config.device_config.device_type == "cpu":
            # With several ranks, vLLM's processes wait for each other in loops of sched_yield. With
            # as many such loops as cores, Linux (seen on 6.18) runs nothing else for many seconds,
            # neither our threads nor other engines. This switch makes them sleep instead.
            vllm_utils.USE_SCHED_YIELD = False
        self._config = vllm_config
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        self._transports: list[Transport] = []
        self._num_blocks = kv_cache_config.num_blocks
        self._shared: SharedMemory | None = None
        self._handshake: PdHandshake | None = None
        # Layers computed so far. Written by the thread that runs the model, read by any.
        self.layers_done = 0
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerHalf(
                tables_of(kv_cache_config), self._kv_transfer_config.engine_id
            )
        else:
            self._groups = groups_of(kv_cache_config)
            self._settings = read_extra_config(self._kv_transfer_config.kv_connector_extra_config)
            on_gpu = vllm_config.device_config.device_type != "cpu"
            self._transports = transport.make(
                self._settings, on_gpu=on_gpu, cooperative=cooperative_kernels(vllm_config)
            )
            if any(each.name == "shm" for each in self._transports):
                self._shared = SharedMemory("pdserve-kv")
            self._instance_id: str = self._kv_transfer_config.engine_id
            if vllm_config.parallel_config.nnodes > 1:
                # The ranks on other nodes have the name of the first one's engine. On one node, the
                # world may also have other engines: the ranks of a data-parallel group.
                self._instance_id = get_world_group().broadcast_object(self._instance_id)
            # Only runner V1 reads these, in the step that delivered them.
            self._resumed: dict[str, list[int]] = {}
            patch_runner_v1(self._resumed)

    def _scheduler_half(self) -> SchedulerHalf:
        assert self._scheduler is not None, "called on the worker's half"
        return self._scheduler

    def _worker_half(self) -> WorkerHalf:
        assert self._worker is not None, "called before the KV cache was registered"
        return self._worker

    # -- for the worker process that hosts the engine

    def take_arrivals(self) -> list[Arrival]:
        return self._scheduler_half().take_arrivals()

    def complete(self, arrivals: Iterable[Arrival], ranks: int) -> set[str]:
        return self._scheduler_half().complete(arrivals, ranks)

    def take_failure(self, request_id: str) -> ErrorInfo | None:
        return self._scheduler_half().take_failure(request_id)

    def holds(self, request_id: str) -> bool:
        return self._scheduler_half().holds(request_id)

    def release(self, request_id: str) -> None:
        self._scheduler_half().release(request_id)

    def export(self, request: Request, transfer_id: str) -> bool:
        return self._scheduler_half().export(request, transfer_id)

    @property
    def wakeup(self) -> int:
        """A descriptor, readable while the end of a transfer awaits the next step."""
        return self._worker_half().driver.wakeup.fileno()

    @property
    def addresses(self) -> tuple[str, ...]:
        return self._scheduler_half().addresses

    def ledger(self) -> KvLedger:
        return self._scheduler_half().ledger()

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """On a GPU, request blocks that are contiguous over all layers: NCCL sends them without
        staging. vLLM uses another layout if the attention backend lacks this one, or if the user
        has set VLLM_KV_CACHE_LAYOUT."""
        size = vllm_config.cache_config.block_size or 0
        if vllm_config.device_config.device_type == "cpu" or not 0 < size <= _MAX_UNSPLIT:
            return None
        # With several ranks, vLLM asks before it knows the larger blocks of a hybrid model.
        return None if vllm_config.model_config.is_hybrid else str(KVCacheLayout.BLHNC.name)

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: KVTransferConfig) -> bool:
        """Return False: peers may map the KV cache, which sleep would free. Since vLLM 0.33."""
        return False

    # -- worker half

    def take_received(self) -> list[Arrival]:
        return self._worker_half().take_received()

    def snapshot(self) -> KvSnapshot:
        return take(self._worker_half().peers)

    def get_mem_pool_context(self) -> AbstractContextManager[None] | None:
        return None if self._shared is None else allocate_in(self._shared)

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        config = self._config
        regions = regions_of(self._groups, kv_caches, self._num_blocks)
        held = [held_of(config, each, kv_caches, region) for each, region in regions.items()]
        groups = joined(of_all_stages(held))
        plan = plan_of(config, groups)
        layout = describe(config, groups) | self._settings.shared_by_peers
        key = compatibility(layout)
        shared = self._shared if self._shared is not None and self._shared.size else None
        by_layers = {each.layers: region for each, region in regions.items()}
        stage = plan.shards[0].stage
        local = LocalKv({n: by_layers[groups[n].stages[stage]] for n in plan.held}, shared)
        transport.check(self._transports, local)
        peers = Peers(
            self._settings,
            self._instance_id,
            self._transports,
            local=local,
            compatibility=key,
            plan=plan,
        )
        self._worker = WorkerHalf(peers, plan, has_draft_kv=has_draft_kv(config))
        stages = plan.own.stage_layers
        self._handshake = PdHandshake(
            peers.address,
            key,
            layout,
            tuple(peers.transports),
            stage_layers=stages if len(stages) > 1 else (),
        )

    def get_handshake_metadata(self) -> PdHandshake | None:
        return self._handshake

    def handshake(self) -> PdHandshake:
        """Return the data for this worker's registration."""
        assert self._handshake is not None, "called before the KV cache was registered"
        return self._handshake

    def handle_preemptions(self, kv_connector_metadata: StepMetadata) -> None:
        self._resumed.clear()  # entries left over are stale
        self._resumed.update(kv_connector_metadata.resumed)
        self._worker_half().before_step(kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """No-op: `before_step` has started the loads, which run during the step."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """No-op: a request is scheduled only when its load has ended."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        self.layers_done += 1

    def wait_for_save(self) -> None:
        metadata = self._connector_metadata
        if isinstance(metadata, StepMetadata):
            self._worker_half().after_step(metadata)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        sent, received, failed = self._worker_half().take_results()
        return KVConnectorTransferResults(sent, received, failed)

    def build_connector_worker_meta(self) -> WorkerOutput | None:
        return self._worker_half().take_output()

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()
        for each in self._transports:
            each.close()
        if self._shared is not None:
            self._shared.close()

    # -- scheduler half

    def on_new_request(self, request: Request) -> None:
        self._scheduler_half().on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int, bool]:
        return self._scheduler_half().matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        self._scheduler_half().after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepMetadata:
        return self._scheduler_half().step_metadata(scheduler_output)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler_half().request_finished(request, block_ids)

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        """Return all groups, so that vLLM fills no block with zeros under a load."""
        loaded: tuple[int, ...] = self._kv_cache_config.transfer_group_ids
        return loaded

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._scheduler_half().worker_output(connector_output)

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], PdHandshake]
    ) -> None:
        """Note the ranks' addresses, by stage and tensor-parallel rank, and their layers.
        Consumers get both in answers."""
        ranks = [metadata[rank] for rank in sorted(metadata)]
        half = self._scheduler_half()
        half.addresses = tuple(rank.address for rank in ranks)
        half.stage_layers = ranks[0].stage_layers


def first_of(connector: Any) -> Any:
    """Return pdserve's own connector. With KV tiers it is the first of two."""
    return getattr(connector, "sub_connectors", [connector])[0]


def start_arrived(scheduler: Any, received: Sequence[Arrival], ranks: int) -> None:
    """Let vLLM's next `schedule` start the requests that `received` completes: loads that succeeded
    on one of the `ranks` each.

    vLLM reads arrivals when it launches a step, and starts their requests after the results of that
    step. With asynchronous scheduling that is two steps later.
    """
    if received and (complete := first_of(scheduler.get_kv_connector()).complete(received, ranks)):
        scheduler._update_from_kv_xfer_finished(KVConnectorOutput(finished_recving=complete))


def tier_token_s(connector: Any) -> float:
    """Return the mean time to load a prompt token from a tier; 0 without one, or before a load."""
    last = getattr(connector, "sub_connectors", [connector])[-1]
    return float(getattr(last, "token_s", 0.0))


def keep_out_of_tiers(connector: Any, request_id: str) -> None:
    """Store no more blocks of the request in tiers, if there are any."""
    for each in getattr(connector, "sub_connectors", [])[1:]:
        each.stop_storing(request_id)


def snapshot_in(_worker: Any) -> KvSnapshot:
    """For `Executor.collective_rpc`: return the KV plane's state in the process that runs this."""
    snapshot: KvSnapshot = first_of(get_kv_transfer_group()).snapshot()
    return snapshot


def handshake_in(_worker: Any) -> PdHandshake:
    """For `Executor.collective_rpc`: return the handshake data of the process that runs this."""
    handshake: PdHandshake = first_of(get_kv_transfer_group()).handshake()
    return handshake


# vLLM checks the base classes of objects that it sends between its processes.
KVConnectorHandshakeMetadata.register(PdHandshake)
KVConnectorMetadata.register(StepMetadata)
KVConnectorWorkerMetadata.register(WorkerOutput)
