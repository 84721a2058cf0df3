"""Changes the weights of a worker in place, as one of the workers of a model that change together.

    serving ─ prepare ─► prepared ─ quiesce ─► quiesced ─ commit ─► committed
       ▲                    │                     │                    │
       └── resume ──────────┴─────────────────────┴────────────────────┘

A router performs the stages on all workers (router/control/weights.py). A worker of which nothing
is heard for `hold_s` resumes by itself, so a router that dies in the middle stops no worker.
A paused model is quiesced before it is prepared. In the mode "keep", streams that keep their KV
stay in the engine, which computes nothing from quiesce to resume.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pdserve.config import UNPIN_S
from pdserve.errors import AnswerAborted, InvalidRequest, Unavailable, WeightsChanging
from pdserve.model.weight_deltas import find_files
from pdserve.security.directories import resolved_within
from pdserve.types import QuiesceMode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdserve.model.weight_deltas import WeightFiles
    from pdserve.types import ModelWeights
    from workers.control.worker_intake import WorkerIntake
    from workers.engine import Engine
    from workers.link.registration import Registrations
    from workers.service import WorkerService

logger = logging.getLogger(__name__)

_POLL_S = 0.002  # streams stand meanwhile
_FIELD = "weights.path"
_ENDED = "the change has ended: this worker heard nothing in time"


@dataclass(slots=True)
class _Change:
    """A change of the weights. `prepared`: the new weights and their files, once checked."""

    transaction: str
    owner: str
    prepared: tuple[ModelWeights, WeightFiles] | None = None
    is_quiesced: bool = False
    is_committed: bool = False
    ends_by_itself: asyncio.TimerHandle | None = None

    @property
    def stage(self) -> str:
        if self.is_committed:
            return "committed"
        return "quiesced" if self.is_quiesced else "prepared"


class WeightsUpdater:
    """State: the change that is being made. The intake has the weights in the engine."""

    def __init__(
        self,
        engine: Engine,
        intake: WorkerIntake,
        service: WorkerService,
        routers: Registrations,
        *,
        allowed: Sequence[str],
    ) -> None:
        """`allowed`: directories from which weights may be loaded."""
        self._engine, self._intake = engine, intake
        self._service, self._routers = service, routers
        self._allowed = allowed
        self._change: _Change | None = None
        self._turn = asyncio.Lock()

    @property
    def weights(self) -> ModelWeights:
        """The weights in the engine."""
        return self._intake.weights

    @property
    def resumes_at(self) -> float | None:
        """The loop's time at which this worker resumes by itself; None if it will not."""
        timer = self._change and self._change.ends_by_itself
        return timer.when() if timer else None

    async def prepare(
        self, transaction: str, owner: str, hold_s: float, weights: ModelWeights
    ) -> ModelWeights:
        """Check the files of `weights`, and return them with their digest. Raises InvalidRequest,
        and Unavailable during another change."""
        async with self._turn:
            change = self._begin(transaction, owner, hold_s)
            try:
                change.prepared = await self._checked(weights)
                change.is_committed = False  # a paused model may be updated more than once
                # While streams go on. With none there is nothing to gain.
                if not change.is_quiesced:
                    await self._engine.stage_weights(change.prepared[1])
                if self._change is not change:  # nothing was heard of the router meanwhile
                    self._engine.unstage_weights()
            except BaseException:
                if not change.is_quiesced:
                    await self._end(change)
                raise
            return change.prepared[0]

    async def _checked(self, weights: ModelWeights) -> tuple[ModelWeights, WeightFiles]:
        path = await asyncio.to_thread(resolved_within, self._allowed, weights.path)
        if path is None:
            text = f"{weights.path!r} is not below an allowed directory, or its files are not"
            raise InvalidRequest(text, field=_FIELD)
        files = await asyncio.to_thread(find_files, path, self._allowed_base, field=_FIELD)
        digest = await self._engine.check_weights(files)
        if weights.digest and weights.digest != digest:
            text = f"the files in {path} are not those of other workers ({weights.digest})"
            raise InvalidRequest(text, field=_FIELD)
        return replace(weights, path=str(path), digest=digest), files

    def _allowed_base(self, directory: Path) -> Path | None:
        """Return the resolved directory of a difference's base, if it is below an allowed one, or
        has the weights of the start."""
        start = Path(self._routers.info.model.path).resolve()
        if directory.resolve() == start:
            return start
        return resolved_within(self._allowed, str(directory))

    async def quiesce(
        self, transaction: str, owner: str, hold_s: float, mode: QuiesceMode, timeout_s: float
    ) -> int:
        """Accept no more requests, and end the open streams. Return the number that was ended.
        Raises Unavailable if streams are still open after `timeout_s`, or during another change."""
        async with self._turn:
            change = self._begin(transaction, owner, hold_s)
            if change.is_quiesced:
                return 0
            self._hold(change, hold_s + timeout_s)
            try:
                ended = await self._empty(f"{owner}: {mode}", mode, timeout_s)
                if self._change is not change:
                    raise Unavailable(_ENDED)
            except BaseException:
                await self._end(change)
                raise
            change.is_quiesced = True
            self._hold(change, hold_s)
            return ended

    async def commit(self, transaction: str, hold_s: float) -> ModelWeights:
        """Load the prepared weights and report them to routers. Raises Unavailable before the
        stages that have to precede. Any other error ends the worker, because its weights are then
        unknown; the next start has its first ones."""
        async with self._turn:
            change = self._change
            if change is None or change.transaction != transaction:
                raise Unavailable(_ENDED)
            if change.is_committed:
                return self._intake.weights
            if change.prepared is None or not change.is_quiesced:
                raise Unavailable(f"this worker is {change.stage}: prepare and quiesce it first")
            self._hold(change, None)
            weights, files = change.prepared
            try:
                computed = await self._engine.update_weights(files)
            except BaseException as error:
                logger.exception("the weights could not be loaded")
                self._service.fail(error)
                raise
            self._intake.weights, change.is_committed = weights, True
            self._service.switched(weights, computed)
            self._hold(change, hold_s)
            await self._routers.announce()
            logger.info("this worker has the weights %s", weights.version)
            return weights

    async def resume(self, transaction: str) -> ModelWeights:
        """Accept requests again. Does nothing if the change has ended."""
        async with self._turn:
            if (change := self._change) is not None and change.transaction == transaction:
                await self._end(change)
            return self._intake.weights

    def hold(self, transaction: str, hold_s: float) -> ModelWeights:
        """Wait another `hold_s`, and no less than before. Does nothing if the change has ended."""
        change = self._change
        if change is not None and change.transaction == transaction:
            # Not during a commit, which has no end of its own; nor under the lock of a stage.
            timer, due = change.ends_by_itself, asyncio.get_running_loop().time() + hold_s
            if timer is not None and timer.when() < due:
                self._hold(change, hold_s)
        return self._intake.weights

    def close(self) -> None:
        """Stop the timer of a change. Idempotent."""
        if self._change is not None:
            self._hold(self._change, None)

    def _begin(self, transaction: str, owner: str, hold_s: float) -> _Change:
        """Return the change of this transaction. Raises Unavailable during another one."""
        change = self._change
        if change is not None and change.transaction != transaction:
            text = f"{change.owner} is changing the weights, which are {change.stage}"
            raise Unavailable(text, retry_after_s=1.0)
        if change is None:
            if self._intake.is_draining:
                raise Unavailable("this worker is draining")
            change = self._change = _Change(transaction, owner)
        self._hold(change, hold_s)
        return change

    def _hold(self, change: _Change, seconds: float | None) -> None:
        """Resume after `seconds` without another stage; None for never."""
        if change.ends_by_itself is not None:
            change.ends_by_itself.cancel()
        change.ends_by_itself = None
        if seconds is not None:
            loop = asyncio.get_running_loop()
            change.ends_by_itself = loop.call_later(seconds, self._give_up, change)

    def _give_up(self, change: _Change) -> None:
        if self._change is change:
            logger.warning("nothing was heard of %s: this worker resumes", change.owner)
            self._serve_again()
            self._routers.renew()

    async def _end(self, change: _Change) -> None:
        self._hold(change, None)
        self._serve_again()
        await self._routers.announce()

    def _serve_again(self) -> None:
        self._change, self._intake.updating = None, ""
        self._engine.unstage_weights()
        self._engine.thaw()

    async def _empty(self, updating: str, mode: QuiesceMode, timeout_s: float) -> int:
        """Return when no stream is open but those that keep their KV, and no block is pinned, and
        the number of streams that were ended."""
        intake, service = self._intake, self._service
        intake.updating, intake.is_announcing = updating, True
        try:
            await self._routers.announce()
        finally:
            intake.is_announcing = False
        open_streams, kept = service.open_streams, frozenset[int]()
        if mode is QuiesceMode.KEEP:
            if keeping := service.keeping():
                kept = await self._frozen(keeping)
            service.abandon(WeightsChanging("the weights of the worker change"), kept)
        elif mode is QuiesceMode.ABORT:
            service.abandon(AnswerAborted("the weights of the worker change"))
        elif not await self._comes_true(lambda: not service.open_streams, timeout_s):
            text = f"{service.open_streams} streams are open after {timeout_s:g} s"
            raise Unavailable(text, retry_after_s=timeout_s)
        service.release_held()
        is_quiet = lambda: service.ledger().has_only(service.open_streams)  # noqa: E731
        if not await self._comes_true(is_quiet, UNPIN_S):
            raise Unavailable(f"blocks are still pinned: {service.ledger()}")
        return 0 if mode is QuiesceMode.WAIT else open_streams - len(kept)

    async def _frozen(self, keeping: Sequence[int]) -> frozenset[int]:
        """Freeze the engine. Return those of these streams that it keeps. Raises Unavailable."""
        try:
            async with asyncio.timeout(UNPIN_S):
                return await self._engine.freeze(keeping)
        except TimeoutError:
            raise Unavailable(f"the engine's step has not ended after {UNPIN_S:g} s") from None

    async def _comes_true(self, condition: Callable[[], bool], within_s: float) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while not condition():  # noqa: ASYNC110 - streams end in many places
                    await asyncio.sleep(_POLL_S)
        return condition()
