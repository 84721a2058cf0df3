"""vLLM's NixlConnector for pdserve's workers. Tested with vLLM 0.32.0 (CPU) and nixl 1.5.1.

NixlConnector moves the KV: decode pulls it when prefill has ended, from the address in prefill's
output parameters. This subclass adds requests that continue after tokens generated elsewhere, the
ledger, transfer reports, and the release of blocks before their lease ends.
"""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlConnector

from kv_transfer.cache.geometry import compatibility
from kv_transfer.protocol.snapshot import KvSnapshot
from kv_transfer.vllm.continuation import Continuations, patch_runner_v1
from kv_transfer.vllm.kv_groups import groups_of, joined
from kv_transfer.vllm.kv_layout import describe, held_of, regions_of
from kv_transfer.vllm.step import Arrival, PdHandshake
from pdserve.errors import TransferFailed
from pdserve.types import ErrorInfo, HandoffStyle, KvLedger, TransferReport

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

NAME = "nixl"


@dataclass(frozen=True, slots=True)
class _Pull:
    """A KV transfer to a request in progress. `began_at` is monotonic."""

    blocks: int
    began_at: float


class PdNixlConnector(NixlConnector):
    """The connector. State of the scheduler half: pulls and leases by vLLM's request id. State of
    the worker half: the tokens that runner V1 reads (continuation.py)."""

    wakeup: int | None = None  # NIXL has none, so the engine must poll
    layers_done: int | None = None  # not counted

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._config = vllm_config
        self._block_size = int(vllm_config.cache_config.block_size)
        groups = kv_cache_config.kv_cache_groups
        self._block_bytes = sum(
            group.kv_cache_spec.page_size_bytes * len(group.layer_names) for group in groups
        )
        self._continuations = Continuations()
        self._pulls: dict[str, _Pull] = {}
        self._leased: dict[str, int] = {}
        self._arrivals: dict[str, Arrival] = {}
        self._failures: dict[str, ErrorInfo] = {}
        self._layout: dict[str, str] = {}
        self._resumed: dict[str, list[int]] = {}
        if role == KVConnectorRole.WORKER:
            patch_runner_v1(self._resumed)

    # -- for the worker process that hosts the engine, as PdConnector has them

    def take_arrivals(self) -> list[Arrival]:
        """Return the pulls that have succeeded since the last call."""
        arrivals, self._arrivals = self._arrivals, {}
        return list(arrivals.values())

    def take_failure(self, request_id: str) -> ErrorInfo | None:
        """Return the error of this request's failed pull, once; else None."""
        return self._failures.pop(request_id, None)

    def holds(self, request_id: str) -> bool:
        """Return True if an ended request's blocks are held for the consumer."""
        return request_id in self._leased

    def release(self, request_id: str) -> None:
        """Free the held blocks of an ended request with the next step."""
        if request_id in self._leased:
            self.connector_scheduler._reqs_need_send[request_id] = 0.0

    def ledger(self) -> KvLedger:
        """Return the blocks pinned for transfers; the engine fills in `engine_requests`."""
        in_flight = sum(pull.blocks for pull in self._pulls.values())
        leased = sum(self._leased.values())
        return KvLedger(
            in_flight_blocks=in_flight,
            leased_blocks=leased,
            transfers=len(self._pulls) + len(self._leased),
        )

    def snapshot(self) -> KvSnapshot:
        """Return an empty snapshot: NIXL exposes no links, and reports counters to vLLM's
        metrics."""
        return KvSnapshot(time.monotonic())

    def handshake(self) -> PdHandshake:
        """Return the data for this worker's registration, without the address, which only the
        scheduler half knows."""
        key = compatibility(self._layout)
        return PdHandshake("", key, self._layout, (NAME,), HandoffStyle.SEQUENTIAL)

    @property
    def addresses(self) -> tuple[str, ...]:
        """Address at which other workers request the handshake of NIXL."""
        half = self.connector_scheduler
        return (f"{half.side_channel_host}:{half.side_channel_port}",)

    # -- worker half

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        config, cache = self._config, self._kv_cache_config
        regions = regions_of(groups_of(cache), kv_caches, cache.num_blocks)
        held = [held_of(config, each, kv_caches, region) for each, region in regions.items()]
        self._layout = {
            **describe(config, joined([held])),
            "connector": NAME,
            "tensor_parallel_size": str(self._config.parallel_config.tensor_parallel_size),
        }

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        super().handle_preemptions(kv_connector_metadata)
        # Only runner V1 reads these, in this step. Entries left over are stale: drop them.
        self._resumed.clear()
        self._resumed.update(kv_connector_metadata.resumed)

    # -- scheduler half

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        # vLLM starts its listener now, on the configured port. A port that was free when the
        # process started may be taken by now, so choose a free one here.
        half = self.connector_scheduler
        with socket.create_server((half.side_channel_host, 0)) as server:
            half.side_channel_port = server.getsockname()[1]
        super().set_xfer_handshake_metadata_pp_aware(metadata)

    def on_new_request(self, request: Request) -> None:
        params = request.kv_transfer_params or {}
        if resume := params.pop("resume", None):
            self._continuations.append(request, resume)
        super().on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        self._continuations.replay_grammar(request)
        matched: tuple[int | None, bool] = super().get_num_new_matched_tokens(
            request, num_computed_tokens
        )
        return matched

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if num_external_tokens > 0:
            prompt = request.num_prompt_tokens
            cached = (prompt - num_external_tokens) // self._block_size
            count = -(-prompt // self._block_size) - cached
            self._pulls[request.request_id] = _Pull(count, time.monotonic())

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Any:
        metadata = super().build_connector_meta(scheduler_output)
        metadata.resumed = self._continuations.take_resumed(scheduler_output)
        return metadata

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        request_id = request.request_id
        self._continuations.finished(request_id)
        self._arrivals.pop(request_id, None)
        held, params = super().request_finished_all_groups(request, block_ids)
        if held:
            self._leased[request_id] = sum(map(len, block_ids))
        return held, params

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        super().update_connector_output(connector_output)
        failed = connector_output.failed_recving or ()
        for request_id in connector_output.finished_recving or ():
            pull = self._pulls.pop(request_id, None)
            if pull is None:
                continue
            if request_id in failed:
                error = ErrorInfo(TransferFailed.code, "NIXL could not fetch the KV")
                self._failures[request_id] = error
            else:
                self._arrivals[request_id] = Arrival(request_id, (), self._report(pull))
        for request_id in connector_output.finished_sending or ():
            self._leased.pop(request_id, None)

    def _report(self, pull: _Pull) -> TransferReport:
        # A pull starts when prefill has ended, so its whole duration is exposed.
        seconds = time.monotonic() - pull.began_at
        size = pull.blocks * self._block_bytes
        return TransferReport(seconds, seconds, size, pull.blocks, NAME)
