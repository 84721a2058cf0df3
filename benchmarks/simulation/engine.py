"""A modelled engine: steps follow each other while there is work, as long as the cost model says.

As in vLLM, each step gives every running request a token and spends what is left of the step's
budget on prompts, first come, first served. Steps that only decode are taken in one stride up to
the next end of a request, and the stride is cut when something comes: so a run costs time by its
requests, not by its tokens.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

from benchmarks.simulation.jobs import Job, Part
from pdserve.step_moments import StepShape
from pdserve.types import WorkerLoad

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.simulation.caches import PrefixCaches
    from benchmarks.simulation.clock import VirtualClock
    from benchmarks.simulation.gaps import Gaps
    from benchmarks.simulation.service_model import EngineModel

_CONTEXT_SCALE = 1e4


@dataclass(slots=True)
class _Stride:
    """`steps` steps from `start` on; the first takes `first_s`, each next `growth_s` longer. With
    prompts in it a stride has one step."""

    start: float
    first_s: float
    growth_s: float
    steps: int
    chunks: list[tuple[Job, int]]

    def until_s(self, steps: int) -> float:
        """From the start to the end of so many steps."""
        return steps * self.first_s + self.growth_s * steps * (steps - 1) / 2

    def ended_by(self, seconds: float) -> int:
        """Steps that have ended after so long."""
        if self.growth_s <= 0:
            done = int(seconds / self.first_s) if self.first_s > 0 else self.steps
        else:
            b = self.first_s / self.growth_s - 0.5
            done = int(math.sqrt(b * b + 2 * seconds / self.growth_s) - b)
        done = min(max(done, 0), self.steps)
        while done < self.steps and self.until_s(done + 1) <= seconds:
            done += 1
        while done and self.until_s(done) > seconds:
            done -= 1
        return done


class Engine:
    """State: jobs that wait, that await KV, whose prompts are computed, and that run. `busy_s`,
    `batch_s` (seconds times running requests) and `computed_tokens` count up to `horizon_s`."""

    def __init__(
        self,
        worker_id: str,
        model: EngineModel,
        clock: VirtualClock,
        *,
        gaps: Gaps,
        on_load: Callable[[WorkerLoad], None],
        caches: PrefixCaches | None = None,
    ) -> None:
        self.worker_id = worker_id
        self.model = model
        self.horizon_s = math.inf
        self.busy_s = self.batch_s = 0.0
        self.computed_tokens = 0
        self._clock = clock
        self._gaps = gaps
        self._on_load = on_load
        self._caches = caches
        self._waiting: deque[Job] = deque()
        self._ready: deque[Job] = deque()
        self._receiving: set[Job] = set()
        self._prompts: list[Job] = []
        self._running = self._context = self._steps = 0
        self._ends: list[tuple[int, int, Job]] = []
        self._fresh: list[Job] = []  # joined since the last step began
        self._leaving: list[Job] = []
        self._taken_blocks = self._held_blocks = self._coming_tokens = 0
        self._held: set[Job] = set()
        self._stride: _Stride | None = None
        self._in_turn = False
        self._count = count()

    @property
    def is_empty(self) -> bool:
        """Whether nothing of any job is left here."""
        jobs = (self._waiting, self._ready, self._receiving, self._prompts, self._held)
        return not (any(jobs) or self._running or self._taken_blocks)

    def submit(self, job: Job) -> None:
        """A decode reserves its blocks at once; others wait for theirs."""
        if job.gone:
            return
        job.submitted_at = self._clock.now_s
        if job.part is Part.DECODE:
            self._taken_blocks += job.blocks
            self._coming_tokens += job.prompt_tokens
            self._receiving.add(job)
            return
        self._waiting.append(job)
        self._stir()

    def receive(self, job: Job, token_at: float) -> None:
        """The KV of a decode is here, and its first token came at `token_at`."""
        if job.gone:
            return
        self._receiving.discard(job)
        job.token_at = token_at
        self._remember(job)
        self._ready.append(job)
        self._stir()

    def give_up(self, job: Job) -> None:
        """The blocks of a prefill that has ended were taken, or nobody wants them."""
        if job in self._held:
            job.gone = True
            self._held.discard(job)
            self._held_blocks -= job.blocks
            self._taken_blocks -= job.blocks
            self._stir()

    def cancel(self, job: Job) -> None:
        """Free all that a job has here; one that runs leaves with the end of its step."""
        if job.gone:
            return
        job.gone = True
        self.give_up(job)
        if job in self._waiting:
            self._waiting.remove(job)
        elif job in self._receiving or job in self._ready:
            self._receiving.discard(job)
            if job in self._ready:
                self._ready.remove(job)
            self._coming_tokens -= job.prompt_tokens
            self._taken_blocks -= job.blocks
        elif job in self._prompts or job.joined_context:
            self._leaving.append(job)
            self._stir()

    def made(self, job: Job) -> int:
        """Tokens of its answer that a job has by now, the first one too."""
        if not job.joined_context:
            return int(job.token_at > 0)
        stride = self._stride
        running = 0 if stride is None else stride.ended_by(self._clock.now_s - stride.start)
        return 1 + self._steps + running - job.joined_step

    @property
    def load(self) -> WorkerLoad:
        """As vLLM reports it: blocks in use are those with KV in them, not those promised."""
        size, total = self.model.block_size, self.model.total_blocks
        used = self._held_blocks + -(-(self._coming_tokens + self._context) // size)
        used = min(total, used)
        waiting = len(self._waiting) + len(self._receiving) + len(self._ready)
        running = self._running + len(self._prompts)
        return WorkerLoad(waiting, running, used / total, total - used)

    def _stir(self) -> None:
        """Something changed: an idle engine begins, a stride ends with the step that is made."""
        stride = self._stride
        if self._in_turn:
            return
        if stride is None:
            self._begin()
            return
        if stride.steps > 1:
            steps = stride.ended_by(self._clock.now_s - stride.start) + 1
            if steps < stride.steps:
                self._stride = _Stride(
                    stride.start, stride.first_s, stride.growth_s, steps, stride.chunks
                )
                self._schedule(self._stride)

    def _begin(self) -> None:
        """The next step, or stride, if there is anything to do."""
        self._take_leave()
        self._join_ready()
        chunks = self._cut_prompts()
        if not chunks and not self._running:
            self._stride = None
            return
        shape = StepShape(
            sum(tokens for _, tokens in chunks),
            sum(tokens * (job.computed + tokens / 2) for job, tokens in chunks),
            0,
            self._running,
            self._context,
        )
        growth_s = self.model.steps.coefficients[4] * self._running / _CONTEXT_SCALE
        steps = 1 if chunks else self._first_end() - self._steps
        self._stride = _Stride(
            self._clock.now_s, self.model.steps.step_s(shape), growth_s, steps, chunks
        )
        self._schedule(self._stride)

    def _schedule(self, stride: _Stride) -> None:
        def end() -> None:
            if self._stride is stride:
                self._end(stride)

        self._clock.at(stride.start + stride.until_s(stride.steps), end)

    def _join_ready(self) -> None:
        while self._ready and self._has_seat:
            job = self._ready.popleft()
            self._coming_tokens -= job.prompt_tokens
            self._join(job)

    @property
    def _has_seat(self) -> bool:
        return self._running + len(self._prompts) < self.model.max_num_seqs

    def _join(self, job: Job) -> None:
        """It runs from the next step on; it has its first token."""
        job.joined_step, job.joined_context = self._steps, job.prompt_tokens + 1
        self._running += 1
        self._context += job.joined_context
        self._fresh.append(job)
        end = self._steps + job.output_tokens - 1
        heapq.heappush(self._ends, (end, next(self._count), job))

    def _cut_prompts(self) -> list[tuple[Job, int]]:
        """What of which prompts the next step computes."""
        chunk = self.model.steps.chunk_tokens
        left = chunk - self._running if chunk else math.inf
        chunks: list[tuple[Job, int]] = []
        for job in self._prompts:
            tokens = int(min(left, job.to_compute))
            if tokens > 0:
                chunks.append((job, tokens))
                left -= tokens
        while left > 0 and self._waiting and self._has_room(self._waiting[0]):
            job = self._waiting.popleft()
            self._admit(job)
            tokens = int(min(left, job.to_compute))
            chunks.append((job, tokens))
            left -= tokens
        return chunks

    def _has_room(self, job: Job) -> bool:
        return self._has_seat and self._taken_blocks + job.blocks <= self.model.total_blocks

    def _admit(self, job: Job) -> None:
        job.admitted_at = self._clock.now_s
        if self._caches is not None:
            job.cached_tokens = self._caches.hit(self.worker_id, job.prefix, job.prompt_tokens)
        job.to_compute = job.prompt_tokens - job.cached_tokens
        self._taken_blocks += job.blocks
        self._coming_tokens += job.prompt_tokens
        self._prompts.append(job)

    def _first_end(self) -> int:
        while self._ends[0][2].gone:
            heapq.heappop(self._ends)
        return self._ends[0][0]

    def _end(self, stride: _Stride) -> None:
        """A stride has ended: tokens come, and whoever has all of its own leaves."""
        now = self._clock.now_s
        self._stride = None
        self._account(stride, now)
        self._steps += stride.steps
        self._context += stride.steps * self._running
        calls: list[Callable[[float], None]] = []
        while self._ends and self._ends[0][0] <= self._steps:
            job = heapq.heappop(self._ends)[2]
            if not job.gone:
                calls.append(job.on_end)
                self._leave(job)
        for job, tokens in stride.chunks:
            job.to_compute -= tokens
            if not job.to_compute and not job.gone:
                calls.append(job.on_first)
                self._computed(job, calls)
        # What is told of the load is older than what comes of the tokens, as in a frame.
        self._in_turn = True
        self._take_leave()
        self._on_load(self.load)
        for call in calls:
            call(now)
        self._in_turn = False
        self._begin()

    def _computed(self, job: Job, calls: list[Callable[[float], None]]) -> None:
        """The prompt has its KV, and its first token is sampled."""
        self._prompts.remove(job)
        self._coming_tokens -= job.prompt_tokens
        self._remember(job)
        job.token_at = self._clock.now_s
        if job.part is Part.PREFILL:
            self._held.add(job)
            self._held_blocks += job.blocks
        elif job.output_tokens > 1:
            self._join(job)
        else:
            self._taken_blocks -= job.blocks
            calls.append(job.on_end)

    def _leave(self, job: Job) -> None:
        job.gone = True
        self._running -= 1
        self._context -= job.joined_context + self._steps - job.joined_step
        self._taken_blocks -= job.blocks

    def _take_leave(self) -> None:
        """Those that were cancelled, between two steps."""
        for job in self._leaving:
            if job in self._prompts:
                self._prompts.remove(job)
                self._coming_tokens -= job.prompt_tokens
                self._taken_blocks -= job.blocks
            else:
                self._leave(job)
        if self._leaving:
            self._fresh = [x for x in self._fresh if not x.gone]
            self._leaving = []

    def _account(self, stride: _Stride, now: float) -> None:
        took_s = max(0.0, min(now, self.horizon_s) - stride.start)
        self.busy_s += took_s
        self.batch_s += took_s * self._running
        if now <= self.horizon_s:
            self.computed_tokens += sum(tokens for _, tokens in stride.chunks)
        first_at = stride.start + stride.first_s
        for job in self._fresh:
            self._gaps.add(first_at - job.token_at)
        self._gaps.add(stride.first_s, self._running - len(self._fresh))
        if stride.steps > 1:
            second_s = stride.first_s + stride.growth_s
            self._gaps.add_growing(second_s, stride.growth_s, stride.steps - 1, self._running)
        self._fresh = []

    def _remember(self, job: Job) -> None:
        if self._caches is not None:
            self._caches.store(self.worker_id, job.prefix)
