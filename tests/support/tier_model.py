"""A model of an engine with a tier below its KV cache, for the explorer. The tier's logic is real:
TieredConnector and TierConnector, and below them vLLM's OffloadingConnectorScheduler,
OffloadingConnectorWorker and CPUOffloadingManager.

The world simulates vLLM's scheduler, which has two steps in flight, computes one block of a prompt
in a step, preempts, and reuses free blocks at once; the copies between cache and tier, which run at
any time after their start; and KV that arrives from a prefill worker. A block's content is the text
up to its end, a letter for each block.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiKVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
    SchedulerOffloadConfig,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import (
    OffloadingConnectorWorker,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec
from vllm.v1.kv_offload.base import (
    OffloadingKVEventsConfig,
    OffloadingWorker,
    TransferResult,
    get_offload_block_hash,
)
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from kv_transfer.vllm.tiers import TierConnector, TieredConnector

if TYPE_CHECKING:
    from tests.support.explorer import Action

BLOCK = 2  # tokens
MOST_IN_FLIGHT = 2  # steps
MOST_PREEMPTIONS = 2  # of a request, which then waits until it is alone
WAITING, LOADING = RequestStatus.WAITING, RequestStatus.WAITING_FOR_REMOTE_KVS


class ModelManager(CPUOffloadingManager):
    """The manager of host memory, with no tier below it."""

    @property
    def primary_tier(self) -> ModelManager:
        return self


class OneConfig(SchedulerOffloadConfig):
    """vLLM's settings of the tier, which copies of the world share."""

    def __reduce__(self) -> Any:
        return _config, ()


def _engine(chunks: int) -> tuple[Any, Any, Any]:
    """Return what vLLM's halves read of the configuration of an engine with a tier of `chunks`
    blocks."""
    spec = SimpleNamespace(
        config=SimpleNamespace(groups=[SimpleNamespace(group_id=0, tokens_per_block=BLOCK)]),
        kv_events_config=OffloadingKVEventsConfig(False, False),
        blocks_per_chunk=1,
        tokens_per_hash=BLOCK,
        tokens_per_block=(BLOCK,),
        offload_prompt_only=False,
        replicated_layout=False,
        get_manager=lambda: ModelManager(chunks),
    )
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(world_size=1, decode_context_parallel_size=1),
        cache_config=SimpleNamespace(
            prefix_cache_retention_interval=None, enable_prefix_caching=True
        ),
        speculative_config=None,
    )
    kv_spec = FullAttentionSpec(BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
    group = KVCacheGroupSpec(["layer"], kv_spec)
    return spec, config, SimpleNamespace(kv_cache_groups=[group])


CONFIG = OneConfig(*OffloadingConnectorScheduler(*_engine(1)).config)


def _config() -> OneConfig:
    return CONFIG


@dataclass(slots=True)
class ModelRequest:
    """What vLLM's scheduler and the connectors read of a request. `text`: prompt and answer, which
    has one token more. `made`: tokens of the answer that are known. `in_flight`: steps that compute
    the request. `stale`: those of them from before its preemption."""

    request_id: str
    text: str
    num_prompt_tokens: int
    kv_transfer_params: dict[str, str] | None
    status: RequestStatus = WAITING
    num_computed_tokens: int = 0
    made: int = 0
    in_flight: int = 0
    stale: int = 0
    blocks: list[int] = field(default_factory=list)
    preemptions: int = 0
    kv_hints: None = None
    skip_reading_prefix_cache: bool = False

    @property
    def block_hashes(self) -> list[bytes]:
        known = min(len(self.text), self.num_tokens // BLOCK)
        return [self.text[: n + 1].encode() for n in range(known)]

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.made

    @property
    def next_count(self) -> int:
        """Number of tokens to compute next: at most a block, and one if it is not known yet."""
        known = max(0, self.num_tokens - self.num_computed_tokens)
        return min(BLOCK, known) or int(self.num_computed_tokens < BLOCK * len(self.text))

    def is_finished(self) -> bool:
        return bool(RequestStatus.is_finished(self.status))


@dataclass(frozen=True, slots=True)
class ModelBlock:
    block_id: int
    block_hash: bytes | None
    is_null: bool = False


@dataclass(slots=True)
class ModelStep:
    """A step: the connectors' metadata, and by request its text, blocks and range of tokens."""

    metadata: Any
    tokens: dict[str, tuple[str, tuple[int, ...], int, int]]


@dataclass(slots=True)
class Arrivals:
    """Our connector, of both roles. By request: the blocks and contents that its prefill worker has
    yet to write. `is_quick`: it writes the first one at once when the engine lets it."""

    cache: dict[int, bytes]
    starts: dict[str, list[tuple[int, bytes]]] = field(default_factory=dict)
    cancels: list[str] = field(default_factory=list)
    loading: list[str] = field(default_factory=list)
    coming: dict[str, list[tuple[int, bytes]]] = field(default_factory=dict)
    ended: list[str] = field(default_factory=list)
    is_quick: bool = False

    def on_new_request(self, request: ModelRequest) -> None:
        pass

    def get_num_new_matched_tokens(self, request: ModelRequest, computed: int) -> tuple[int, bool]:
        is_received = request.kv_transfer_params is not None and not request.preemptions
        missing = request.num_tokens - computed
        return (missing, True) if is_received else (0, False)

    def update_state_after_alloc(self, request: ModelRequest, blocks: Any, external: int) -> None:
        if external:
            ids = [block.block_id for block in blocks.blocks[0]]
            self.starts[request.request_id] = [*zip(ids, request.block_hashes, strict=True)]
            self.loading.append(request.request_id)

    def build_connector_meta(self, _output: Any) -> Any:
        metadata = self.starts, self.cancels
        self.starts, self.cancels = {}, []
        return metadata

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        self.loading = [x for x in self.loading if x not in output.finished_recving]

    def request_finished_all_groups(self, request: ModelRequest, _: Any) -> tuple[bool, None]:
        if request.request_id in self.loading:
            self.cancels.append(request.request_id)
        return False, None

    def handle_preemptions(self, metadata: Any) -> None:
        starts, cancels = metadata
        for request_id, blocks in starts.items():
            self.coming[request_id] = list(blocks)
            if self.is_quick:
                self.arrive(request_id)
        for request_id in cancels:
            if self.coming.pop(request_id, None) is not None:
                self.ended.append(request_id)

    def arrive(self, request_id: str) -> None:
        block, content = self.coming[request_id].pop(0)
        self.cache[block] = content
        if not self.coming[request_id]:
            del self.coming[request_id]
            self.ended.append(request_id)


class ModelCopies(OffloadingWorker):
    """The copies between cache and tier. `jobs`: the pairs of source and target not yet copied. A
    synchronous one copies at once, as between host memories."""

    def __init__(self, cache: dict[int, bytes], *, is_async: bool) -> None:
        self.cache, self.is_async = cache, is_async
        self.tier: dict[int, bytes | None] = {}
        self.jobs: dict[int, tuple[bool, list[tuple[int, int]]]] = {}
        self.done: list[int] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._submit(job_id, src_spec, dst_spec, is_store=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._submit(job_id, src_spec, dst_spec, is_store=False)

    def _submit(self, job_id: int, source: Any, target: Any, *, is_store: bool) -> bool:
        pairs = zip(source.block_ids.tolist(), target.block_ids.tolist(), strict=True)
        self.jobs[job_id] = is_store, list(pairs)
        if not self.is_async:
            self.wait({job_id})
        return True

    def copy(self, job_id: int) -> None:
        """Copy the next block of a job."""
        is_store, pairs = self.jobs[job_id]
        source, target = pairs.pop(0)
        if is_store:
            self.tier[target] = self.cache.get(source)
        else:
            self.cache[target] = self.tier[source] or b""
        if not pairs:
            del self.jobs[job_id]
            self.done.append(job_id)

    def wait(self, job_ids: set[int]) -> None:
        for job_id in sorted(job_ids):
            while job_id in self.jobs:
                self.copy(job_id)

    def get_finished(self) -> list[TransferResult]:
        done, self.done = self.done, []
        return [TransferResult(job_id, True, None, None) for job_id in done]


def _tier(scheduler: Any, worker: Any) -> TierConnector:
    """Return a half of the tier's connector, without the configuration of an engine."""
    made = TierConnector.__new__(TierConnector)
    made.connector_scheduler, made.connector_worker = scheduler, worker
    made.token_s, made._loads = 0.0, {}
    made.__dict__["_bounding_group_ids"] = ()  # groups that are not in the tier
    return made


def _tiered(arrivals: Arrivals, tier: TierConnector) -> TieredConnector:
    made = TieredConnector.__new__(TieredConnector)
    made._connectors = [arrivals, tier]
    made._requests_to_connector, made._extra_async_saves = {}, {}
    made._all_support_hma = True
    return made


class TierWorld:
    """The whole state. `texts`: of the requests in their order, a letter for each block. What
    follows a dot is the answer. After a plus, the prompt's KV comes from a prefill worker.
    `aborts`: how many requests may be aborted."""

    def __init__(
        self, texts: tuple[str, ...], *, blocks: int, chunks: int, aborts: int, is_async: bool
    ) -> None:
        self.texts, self.num_blocks, self.aborts = texts, blocks, aborts
        self.added = 0
        self.requests: dict[str, ModelRequest] = {}
        self.waiting: list[str] = []
        self.running: list[str] = []
        self.received: list[str] = []
        self.ended: list[str] = []  # since the last step was scheduled
        self.owner: dict[int, str] = {}
        self.deferred: list[tuple[int, list[int]]] = []  # steps that may still write to blocks
        self.to_run: list[ModelStep] = []
        self.to_read: list[tuple[ModelStep, KVConnectorOutput]] = []
        self.cache: dict[int, bytes] = {}
        spec, config, caches = _engine(chunks)
        self.arrivals = Arrivals(self.cache)
        self.copies = ModelCopies(self.cache, is_async=is_async)
        self.tier = OffloadingConnectorScheduler(spec, config, caches)
        self.tier.config = CONFIG
        self.worker = OffloadingConnectorWorker(spec, None, None)  # type: ignore[arg-type]
        self.worker.spec, self.worker.worker = None, self.copies
        self.tier_half = _tier(self.tier, None)
        self.connector = _tiered(self.arrivals, self.tier_half)
        self.in_worker = _tiered(self.arrivals, _tier(None, self.worker))

    # -- vLLM's scheduler

    def add(self) -> None:
        text, name = self.texts[self.added], f"r{self.added}"
        self.added += 1
        params = {"role": "consumer"} if text[0] == "+" else None
        prompt, _, answer = text.removeprefix("+").partition(".")
        request = ModelRequest(name, prompt + answer, BLOCK * len(prompt), params)
        self.requests[name] = request
        self.waiting.append(name)
        self.connector.on_new_request(request)

    def abort(self, name: str) -> None:
        request = self.requests[name]
        is_loading = request.status is LOADING and name not in self.received
        request.status = RequestStatus.FINISHED_ABORTED
        for names in (self.waiting, self.running, self.received):
            if name in names:
                names.remove(name)
        self.end(request, keeps_blocks=is_loading)

    def end(self, request: ModelRequest, *, keeps_blocks: bool) -> None:
        held, _ = self.connector.request_finished_all_groups(request, (request.blocks,))
        assert not held
        self.ended.append(request.request_id)
        if not keeps_blocks:
            self.free(request)
            del self.requests[request.request_id]

    def free(self, request: ModelRequest) -> None:
        blocks, request.blocks = request.blocks, []
        if request.in_flight:
            flying = [*self.to_run, *(step for step, _ in self.to_read)]
            self.deferred.append((sum(bool(step.tokens) for step in flying), blocks))
            return
        for block in blocks:
            del self.owner[block]

    def take(self, request: ModelRequest, tokens: int) -> list[int] | None:
        """Return the new blocks for the request's first `tokens` tokens, None if too few are
        free."""
        count = -(-tokens // BLOCK) - len(request.blocks)
        unused = [n for n in range(1, self.num_blocks + 1) if n not in self.owner]
        if count > len(unused):
            return None
        self.owner |= dict.fromkeys(unused[:count], request.request_id)
        request.blocks += unused[:count]
        return unused[:count]

    def fits(self, request: ModelRequest) -> bool:
        """Return True if all known tokens of a request fit, beside those of the prompts in
        progress."""
        begun = [x for x in self.requests.values() if x.status in (LOADING, RequestStatus.RUNNING)]
        wanted = sum(max(0, -(-x.num_tokens // BLOCK) - len(x.blocks)) for x in [*begun, request])
        return wanted <= self.num_blocks - len(self.owner)

    def preempt(self, name: str) -> None:
        request = self.requests[name]
        self.running.remove(name)
        self.waiting.insert(0, name)
        self.free(request)
        request.status, request.preemptions = RequestStatus.PREEMPTED, request.preemptions + 1
        request.num_computed_tokens, request.stale = 0, request.in_flight

    def schedule(self) -> None:
        """Schedule a step: running requests first, in their order."""
        scheduled: dict[str, int] = {}
        grown: dict[str, list[int]] = {}
        preempted: set[str] = set()
        for name in list(self.running):
            request = self.requests[name]
            count = request.next_count
            if name in preempted or not count:
                continue
            end = request.num_computed_tokens + count
            while (new := self.take(request, end)) is None and name not in preempted:
                preempted.add(self.running[-1])
                self.preempt(self.running[-1])
            if new is not None:
                scheduled[name], grown[name] = count, new
        scheduled = {name: n for name, n in scheduled.items() if name not in preempted}
        first, resumed = ([], []) if preempted else self.admit(scheduled)
        self.send_step(scheduled, grown, first, resumed, preempted)

    def admit(self, scheduled: dict[str, int]) -> tuple[list[str], list[str]]:
        """Start waiting requests, or their loads. Return those that compute in this step: for the
        first time, and again."""
        first: list[str] = []
        resumed: list[str] = []
        # Loads first, as in vLLM, which puts what it skipped to the front.
        for name in sorted(self.waiting, key=lambda x: self.requests[x].status is not LOADING):
            request, external = self.requests[name], 0
            if request.status is LOADING:
                if name not in self.received:
                    continue
                self.received.remove(name)
                request.status = RequestStatus.PREEMPTED if request.preemptions else WAITING
                if request.num_computed_tokens == request.num_tokens:
                    request.num_computed_tokens -= 1
            elif request.preemptions == MOST_PREEMPTIONS and self.owner:
                continue
            elif not self.fits(request):
                break
            else:
                external, _ = self.connector.get_num_new_matched_tokens(request, 0)
                if external is None:
                    continue
            computed = request.num_computed_tokens
            count = 0 if external else request.next_count
            if self.take(request, computed + external + count) is None:
                break
            hashes = [None if external else b"cached"] * len(request.blocks)
            blocks = [ModelBlock(*x) for x in zip(request.blocks, hashes, strict=True)]
            allocated = SimpleNamespace(blocks=(blocks,))
            self.connector.update_state_after_alloc(request, allocated, external)
            if external:
                request.status, request.num_computed_tokens = LOADING, external
                continue
            self.waiting.remove(name)
            self.running.append(name)
            (resumed if request.status is RequestStatus.PREEMPTED else first).append(name)
            request.status, scheduled[name] = RequestStatus.RUNNING, count
        return first, resumed

    def send_step(
        self,
        scheduled: dict[str, int],
        grown: dict[str, list[int]],
        first: list[str],
        resumed: list[str],
        preempted: set[str],
    ) -> None:
        blocks = {name: (list(self.requests[name].blocks),) for name in scheduled}
        again = [name for name in scheduled if name not in first]
        output: Any = SimpleNamespace(
            scheduled_new_reqs=[SimpleNamespace(req_id=x, block_ids=blocks[x]) for x in first],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=again,
                new_block_ids=[blocks[x] if x in resumed else (grown[x],) for x in again],
                resumed_req_ids=set(resumed),
            ),
            num_scheduled_tokens=scheduled,
            finished_req_ids=list(self.ended),
            preempted_req_ids=preempted,
            kv_cache_block_copies=None,
            kv_connector_block_state=None,
        )
        step = ModelStep(self.connector.build_connector_meta(output), {})
        self.ended = []
        for name, count in scheduled.items():
            request = self.requests[name]
            begin = request.num_computed_tokens
            request.num_computed_tokens += count
            request.in_flight += 1
            step.tokens[name] = request.text, tuple(request.blocks), begin, begin + count
        self.to_run.append(step)

    def read_output(self) -> None:
        step, output = self.to_read.pop(0)
        if step.tokens:
            self.deferred = [(left - 1, blocks) for left, blocks in self.deferred]
            for block in [x for left, blocks in self.deferred if not left for x in blocks]:
                del self.owner[block]
            self.deferred = [x for x in self.deferred if x[0]]
        for name, (_, _, _, end) in step.tokens.items():
            if (request := self.requests.get(name)) is None:
                continue
            request.in_flight -= 1
            if request.stale or end < request.num_tokens:
                request.stale = max(0, request.stale - 1)
                continue
            request.made += 1
            if end == BLOCK * len(request.text):
                request.status = RequestStatus.FINISHED_LENGTH_CAPPED
                self.running.remove(name)
                self.end(request, keeps_blocks=False)
        self.connector.update_connector_output(output)
        for name in sorted(output.finished_recving or ()):
            if self.requests[name].status is LOADING:
                self.received.append(name)
            else:
                self.free(self.requests.pop(name))

    # -- the worker process, the copies and the prefill worker

    def execute(self, is_quick: bool) -> None:
        step = self.to_run.pop(0)
        self.arrivals.is_quick = is_quick
        self.in_worker.handle_preemptions(step.metadata)
        tier = step.metadata.metadata[1]
        self.worker.start_kv_transfers(tier)
        for text, blocks, begin, end in step.tokens.values():
            for index in range(-(-end // BLOCK)):
                content, start = text[: index + 1].encode(), index * BLOCK
                if start < begin:
                    kept = self.cache[blocks[index]]
                    is_partial = begin < start + BLOCK and kept == content + b"?"
                    assert is_partial or kept == content, "wrong KV"
                if begin < start + BLOCK:
                    is_full = end >= start + BLOCK
                    self.cache[blocks[index]] = content if is_full else content + b"?"
        self.worker.prepare_store_kv(tier)
        _, received = self.worker.get_finished(set())
        received |= set(self.arrivals.ended)
        self.arrivals.ended = []
        reported = MultiKVConnectorWorkerMetadata((None, self.worker.build_connector_worker_meta()))
        output = KVConnectorOutput(finished_recving=received, kv_connector_worker_meta=reported)
        self.to_read.append((step, output))

    def copy(self, job_id: int) -> None:
        is_store, pairs = self.copies.jobs[job_id]
        name = self.tier._jobs[job_id].req_id
        assert is_store or self.owner.get(pairs[0][1]) == name, "loaded into another's block"
        self.copies.copy(job_id)

    def arrive(self, name: str) -> None:
        block, _ = self.arrivals.coming[name][0]
        assert self.owner.get(block) == name, "arrived in another's block"
        self.arrivals.arrive(name)

    # -- possible actions

    def enabled(self) -> list[Action]:
        found: list[Action] = []
        for kind in (True, False):  # the stores keep their order, and the loads
            jobs = [job for job, (is_store, _) in self.copies.jobs.items() if is_store is kind]
            found += [("copy", job) for job in jobs[:1]]
        found += [("arrive", name) for name in self.arrivals.coming]
        if self.to_read:
            found.append(("read_output",))
        if self.to_run:
            found.append(("execute", False))
            if self.to_run[0].metadata.metadata[0][0]:
                found.append(("execute", True))
        if self.added < len(self.texts):
            found.append(("add",))
        has_work = self.waiting or self.ended or self.tier.has_pending_push_work()
        has_tokens = any(self.requests[name].next_count for name in self.running)
        is_busy = len(self.to_run) + len(self.to_read) >= MOST_IN_FLIGHT
        if (has_work or has_tokens or self.arrivals.cancels or self.requests) and not is_busy:
            found.append(("schedule",))
        return found

    def possible_faults(self) -> list[Action]:
        if not self.aborts:
            return []
        return [("fault", x) for x, each in self.requests.items() if not each.is_finished()]

    def fault(self, name: str) -> None:
        self.aborts -= 1
        self.abort(name)

    def without_effect(self) -> Action | None:
        return None

    def do(self, action: Action) -> None:
        getattr(self, action[0])(*action[1:])
        manager: Any = self.tier.manager
        for key, chunk in manager._policy.chunks.items():
            if chunk.is_ready:
                kept, name = self.copies.tier.get(chunk.chunk_id), get_offload_block_hash(key)
                assert kept == name, f"the tier keeps {kept!r} as {name!r}"
        # Times and totals, which influence no decision.
        self.tier._connector_stats = OffloadingConnectorStats()
        manager.allocation_sizes_in_current_batch.clear()
        for state in self.tier._req_status.values():
            state.deferred_lookup_start_time = None
        self.tier_half.token_s = 0.0
        loads = self.tier_half._loads
        loads.update({name: (count, 0.0) for name, (count, _) in loads.items()})

    def settle(self) -> None:
        assert not self.requests, f"requests {[*self.requests]} are left"
        assert not self.owner, f"blocks {self.owner} are left"
        assert not self.copies.jobs
        assert not self.tier._jobs, "the tier keeps jobs"
        assert not self.tier._req_status, "the tier keeps requests"
        assert not self.tier._block_id_to_pending_jobs, "the tier watches blocks"
        assert not self.tier_half._loads, "the tier keeps loads"
        assert not self.connector._requests_to_connector
