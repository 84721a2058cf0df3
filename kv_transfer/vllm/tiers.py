"""Tiers below the KV cache: host memory, and files (kv_transfer/tiers/block_files.py). Tested with
vLLM 0.32.0.

vLLM's OffloadingConnector and TieringOffloadingManager decide which blocks are stored, loaded and
evicted. This module adds copies for a KV cache in host memory, a disk tier with digests and a
quota, and host memory that does not outlive its process. `TieredConnector` queries our connector
first and this one second, so KV from a prefill worker has priority.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiConnector,
    MultiKVConnectorMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec
from vllm.v1.kv_offload.base import (
    GPULoadStoreSpec,
    LookupResult,
    Medium,
    OffloadingWorker,
    RequestOffloadingContext,
    TransferResult,
    get_offload_block_hash,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.cpu.gpu_worker import CPUOffloadingWorker
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kv_transfer.cache.geometry import KvGeometry
from kv_transfer.cache.host_memory import KvRegion
from kv_transfer.tiers.block_files import BlockFiles
from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingManager
    from vllm.v1.kv_offload.tiering.base import TransferJob
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

_log = logging.getLogger(__name__)
_SHARED = Path("/dev/shm")
_SPECS = (FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec)
_DRAIN_TIMEOUT_S = 60.0
_NEWEST_LOAD = 0.1  # weight of the newest load in the mean


class TieredConnector(MultiConnector):
    """Our connector and a TierConnector, in this order."""

    def handle_preemptions(self, kv_connector_metadata: MultiKVConnectorMetadata) -> None:
        """Let the tier copy the blocks of ended requests before ours lets peers write to them."""
        pairs = zip(self.sub_connectors, kv_connector_metadata.metadata, strict=True)
        for connector, metadata in reversed(list(pairs)):
            connector.handle_preemptions(metadata)


class TierConnector(OffloadingConnector):
    """vLLM's connector, for requests whose KV is not received from another worker.

    State of the scheduler half: `token_s`, the mean time to load a prompt token over the last
    loads, 0 before the first; and for each load in progress its tokens and start time."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        if not all(type(spec) in _SPECS for spec in specs):
            raise ConfigError(
                "kv.tiers is for models with full attention and windows", field="kv.tiers"
            )
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        if role == KVConnectorRole.SCHEDULER:
            extra["namespace"] = _namespace(vllm_config, kv_cache_config)
        super().__init__(vllm_config, role, kv_cache_config)
        self.token_s = 0.0
        self._loads: dict[str, tuple[int, float]] = {}

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Return None, so that our other connector or vLLM selects the layout."""
        return None

    def on_new_request(self, request: Request) -> None:
        """Set the request's limits. A consumer neither loads nor stores, because its prefill worker
        has done both, and `no_tiers` forbids to store. Other requests load at most half of the host
        tier: a request that needs more would evict its own blocks."""
        super().on_new_request(request)
        state = self.scheduler._req_status[request.request_id]
        params = request.kv_transfer_params or {}
        is_consumer = params.get("role") == "consumer" or bool(params.get("do_remote_prefill"))
        if is_consumer:
            state.max_load_tokens = state.max_offload_tokens = 0
        else:
            if params.get("no_tiers"):
                state.max_offload_tokens = 0
            manager = self.scheduler.manager
            chunks = manager.primary_tier._num_chunks // (2 * len(state.group_states))
            state.max_load_tokens = chunks * state.config.kv_group_configs[0].tokens_per_chunk

    def stop_storing(self, request_id: str) -> None:
        """Store no more blocks of a request that runs."""
        if (state := self.scheduler._req_status.get(request_id)) is not None:
            state.max_offload_tokens = 0

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        # Copies of ended requests' blocks, which run up to a step later, must end before these
        # blocks are written. vLLM sees neither a load of another connector nor, before the load
        # has ended, its request in the scheduler's output.
        self.scheduler._current_batch_allocated_block_ids.update(
            block.block_id
            for block in chain.from_iterable(blocks.blocks)
            if not block.is_null and block.block_hash is None  # others are from the prefix cache
        )
        if num_external_tokens:
            self._loads[request.request_id] = num_external_tokens, time.monotonic()

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        super().update_connector_output(connector_output)
        for request_id in connector_output.finished_recving or ():
            if load := self._loads.pop(request_id, None):
                token_s = (time.monotonic() - load[1]) / load[0]
                weight = _NEWEST_LOAD if self.token_s else 1.0
                self.token_s += weight * (token_s - self.token_s)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._loads.pop(request.request_id, None)
        held: tuple[bool, dict[str, Any] | None]
        held = super().request_finished_all_groups(request, block_ids)
        return held


def _namespace(config: VllmConfig, kv_cache_config: KVCacheConfig) -> str:
    """Return a key of everything that determines a block's bytes, except the tokens and adapter in
    its name. Weights are identified by the sizes and times of their files."""
    model, cache, draft = config.model_config, config.cache_config, config.speculative_config
    files = [(path.name, path.stat()) for path in Path(model.model).iterdir() if path.is_file()]
    meaning = (
        vllm.__version__,
        model.compute_hash(),
        sorted((name, status.st_size, status.st_mtime_ns) for name, status in files),
        config.load_config.load_format,
        model.seed,
        model.enforce_eager,  # compiled code rounds differently
        [
            (group.layer_names, repr(group.kv_cache_spec))
            for group in kv_cache_config.kv_cache_groups
        ],
        cache.cache_dtype,
        cache.kv_cache_layout,
        cache.prefix_caching_hash_algo,
        config.parallel_config.tensor_parallel_size,
        getattr(draft, "model", None),
        # The CPU attention kernel packs keys by instruction set.
        (torch.backends.cpu.get_cpu_capability(), torch.cpu._is_amx_tile_supported()),
    )
    return hashlib.sha256(json.dumps(meaning, default=str).encode()).hexdigest()[:16]


class TierSpec(TieringOffloadingSpec):
    """Factory of the connector's halves. vLLM calls `get_worker` in the processes that run the
    model, and then `get_manager` in the scheduler's process."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._engine_id: str = f"pdserve-{self.extra_config['pid']}-{config.engine_id}"
        self._worker: OffloadingWorker | None = None

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._worker is None:
            self._worker = self.create_worker(kv_caches)
        return self._worker

    def create_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        _remove_stale()
        region = SharedOffloadRegion(
            engine_id=self._engine_id,
            num_chunks=self.num_chunks,
            rank=0 if self.replicated_layout else self.config.parallel.rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        region._creator = False  # else `cleanup` also removes the name, which get_manager does
        if kv_caches.tensors[0].tensor.device.type == "cpu":
            return HostWorker(kv_caches, region)
        return CPUOffloadingWorker(kv_caches, self.blocks_per_chunk, self.num_chunks, region)

    def get_manager(self) -> OffloadingManager:
        """Map the memory that the workers have created and remove its name. The kernel then frees
        it with the last process, even if all are killed."""
        if self._manager is None:
            path = _SHARED / f"vllm_offload_{self._engine_id}.mmap"
            if not path.exists():
                raise RuntimeError(f"{path}, the host tier, was removed while the engine started")
            super().get_manager()
            path.unlink()
        return self._manager


def _remove_stale() -> None:
    """Remove the memory of processes that were killed before `get_manager` removed its name."""
    for path in _SHARED.glob("vllm_offload_pdserve-*"):
        if not psutil.pid_exists(int(path.name.split("-")[1])):
            path.unlink(missing_ok=True)


class HostWorker(OffloadingWorker):
    """Copies between a KV cache in host memory and the host tier. Copies are synchronous."""

    def __init__(self, kv_caches: CanonicalKVCaches, region: SharedOffloadRegion) -> None:
        self._region = region
        self._done: list[TransferResult] = []
        pairs = [
            (each.tensor, region.create_next_worker_view(each.page_size_bytes))
            for each in kv_caches.tensors
        ]
        # For each KV-cache group: the pages of its layers in the cache and in the tier.
        self._groups = [
            [pairs[i] for i in sorted({ref.tensor_idx for ref in refs})]
            for refs in kv_caches.group_data_refs
        ]

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: Any) -> bool:
        return self._copy(job_id, src_spec, dst_spec.block_ids, is_store=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: GPULoadStoreSpec) -> bool:
        return self._copy(job_id, dst_spec, src_spec.block_ids, is_store=False)

    def _copy(self, job_id: int, cache: GPULoadStoreSpec, rows: Any, *, is_store: bool) -> bool:
        begun, size, start = time.perf_counter(), 0, 0
        for pages, count in zip(self._groups, cache.group_sizes, strict=True):
            blocks = torch.from_numpy(cache.block_ids[start : start + count].astype(np.int64))
            places = torch.from_numpy(np.asarray(rows[start : start + count], np.int64))
            for ours, theirs in pages:
                if is_store:
                    theirs[places] = ours[blocks]
                else:
                    ours[blocks] = theirs[places]
                size += count * ours.shape[1]
            start += count
        self._done.append(TransferResult(job_id, True, size, time.perf_counter() - begun))
        return True

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Do nothing: copies are synchronous."""

    def shutdown(self) -> None:
        self._groups = []
        self._region.cleanup()


class DiskTier(SecondaryTierManager):
    """Files below the host tier. State: the jobs in progress, and unreadable blocks, which count as
    missing until they are stored again."""

    medium = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: TierSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        root: str,
        quota_bytes: int,
        backpressure_detector: Any = None,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        view = np.asarray(primary_kv_view)
        rows, size = view.shape
        geometry = KvGeometry(1, rows, size, rows * size, size)
        self._region = KvRegion(view.ctypes.data, rows * size, geometry)
        namespace = offloading_spec.extra_config["namespace"]
        self._files = BlockFiles(Path(root), namespace, quota_bytes)
        self._pools = ThreadPoolExecutor(2, "kv-load"), ThreadPoolExecutor(1, "kv-store")
        self._jobs: dict[int, tuple[TransferJob, Future[list[bytes]]]] = {}
        self._unreadable: set[bytes] = set()

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        is_there = key not in self._unreadable and self._files.has(_file_name(key))
        return LookupResult.HIT if is_there else LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        self._unreadable.difference_update(job_metadata.keys)
        self._submit(self._pools[1], self._files.store, job_metadata)

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._submit(self._pools[0], self._files.load, job_metadata)

    def _submit(
        self,
        pool: ThreadPoolExecutor,
        work: Callable[[str, KvRegion, int], object],
        job: TransferJob,
    ) -> None:
        def run() -> list[bytes]:
            """Copy the blocks and return the keys of the blocks copied."""
            pairs = zip(job.keys, job.chunk_ids, strict=True)
            return [k for k, i in pairs if work(_file_name(k), self._region, int(i)) is not False]

        self._jobs[job.job_id] = job, pool.submit(run)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        results = []
        for job_id, (job, future) in list(self._jobs.items()):
            if not future.done():
                continue
            del self._jobs[job_id]
            error = future.exception()
            if error is not None:
                _log.warning("the disk tier failed on %d blocks: %s", len(job.keys), error)
            copied = [] if error else future.result()
            if job.is_promotion:
                self._unreadable.update(set(job.keys).difference(copied))
            is_whole = len(copied) == len(job.keys)
            results.append(JobResult(job_id, is_whole, copied or None))
        return results

    def drain_jobs(self) -> None:
        wait([future for _, future in self._jobs.values()], _DRAIN_TIMEOUT_S)

    def shutdown(self) -> None:
        for pool in self._pools:
            pool.shutdown(cancel_futures=True)


def _file_name(key: bytes) -> str:
    return f"{get_offload_block_hash(key).hex()}-{get_offload_group_idx(key)}"
