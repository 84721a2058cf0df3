"""Changes the weights of a model on all its workers, as one transaction.

    prepare   every worker checks and loads the files   any refusal ─► all resume, unchanged
    quiesce   no worker accepts requests, streams end   any failure ─► all resume, unchanged
    commit    every worker takes the weights            a worker that cannot ends
    resume    workers with the new weights serve

From the first commit on, every router sends requests to workers with the new weights alone
(`Fleet.weights_of`). A worker that started meanwhile, or that was left out because this router
died, is outdated: it gets no requests until a router has repaired it. Before the first commit,
workers whose router died resume by themselves after `hold_s`.

The workers are the lock: each takes part in one transaction and names its owner to others.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct, structs

from pdserve import wire
from pdserve.errors import InvalidRequest, PdserveError, PermissionDenied, Unavailable
from pdserve.types import ModelWeights, Role
from pdserve.v1 import worker_pb2 as w
from router.control.model_change import ModelChanges, errors_of, succeed
from router.control.worker_rpc import worker_stub

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdserve.config import WeightsConfig
    from pdserve.net.rpc import Dialer
    from router.fleet.member import Member
    from router.fleet.registry import Fleet

logger = logging.getLogger(__name__)

_PAUSED = "paused"
PERIOD_S = 0.25
# Pause of a repair after a failure, which would repeat each period.
RETRY_S = 10.0
_RESUME_S = _HOLD_S = 10.0
# In addition to the timeout of the streams, for the blocks of ended requests.
_QUIESCE_S = 60.0
_ALL = tuple(Role)


class UpdateView(Struct, frozen=True):
    """A transaction at one time. `phase`: prepare, quiesce, paused, commit or resume. `seconds`:
    its age. `workers`: those that take part."""

    model: str
    phase: str
    version: str
    owner: str
    seconds: float
    workers: Sequence[str]


@dataclass(slots=True, eq=False)
class _Transaction:
    """`members` take part. While `is_paused`, they stay quiesced until `resume`. `hold_s`: after
    which a worker resumes by itself."""

    model: str
    members: list[Member]
    began: float
    id: str
    hold_s: float
    phase: str = "prepare"
    version: str = ""
    is_paused: bool = False


class WeightUpdates:
    """Updates weights, and repairs workers with older ones. State: the transaction of each model,
    and why outdated workers could not be repaired, by instance id."""

    def __init__(
        self,
        fleet: Fleet,
        dialer: Dialer,
        config: WeightsConfig,
        owner: str,
        count: Callable[[str, str, str], None],
    ) -> None:
        """`owner` names this router to others. `count` counts a metric by model and result."""
        self._fleet, self._dialer, self._config = fleet, dialer, config
        self._owner, self._count = owner, count
        self._open: dict[str, _Transaction] = {}
        self._not_repaired: dict[str, tuple[float, str]] = {}
        self._changes = ModelChanges()

    # -- Views

    def views(self) -> list[UpdateView]:
        now = self._fleet.now()
        return [
            UpdateView(
                model=x.model,
                phase=x.phase,
                version=x.version,
                owner=self._owner,
                seconds=now - x.began,
                workers=[m.worker_id for m in x.members],
            )
            for x in self._open.values()
        ]

    def model_named(self, name: str) -> str:
        """Return the first name of the model `name`, or of the only one. Raises InvalidRequest."""
        models = self._fleet.models().values()
        found = [x.name for x in models if name in x.names or not name]
        if len(found) != 1:
            served = ", ".join(x.name for x in models) or "none"
            raise InvalidRequest(f"'model' must be one of these: {served}", field="model")
        return found[0]

    def open_change(self, model: str) -> UpdateView | None:
        return next((x for x in self.views() if x.model == model), None)

    def is_paused(self, model: str) -> bool:
        found = self._open.get(model)
        return found is not None and found.is_paused

    def laggards(self, model: str) -> dict[str, str]:
        """Return the workers of a model that lack its newest weights, and why."""
        return {
            m.worker_id: self._not_repaired.get(m.info.instance_id, (0.0, "being repaired"))[1]
            for m in self._members(model)
            if m.is_outdated
        }

    # -- Changes. They continue if the caller is cancelled.

    async def update(
        self, model: str, path: str, version: str = "", mode: str = "", timeout_s: float = 0.0
    ) -> ModelWeights:
        """Replace the weights of a model by those in the directory `path` of its workers' machines.
        A call for an update that is running waits for its end.

        `mode`: what happens to open streams, default `router.weights.mode`. `timeout_s`: for them
        to end in the mode "wait", default `router.weights.timeout_s`. A paused model stays paused.
        Raises InvalidRequest, PermissionDenied or Unavailable if nothing has changed, and an error
        of a worker if none could load the weights.
        """
        self._check_path(path)
        mode, timeout_s = self._checked(mode, timeout_s)

        async def update() -> ModelWeights:
            change = self._paused(model) or self._begin(model, timeout_s)
            try:
                done = await self._update(change, path, version, mode, timeout_s)
                self._count("weights_updates", model, "done")
                return done
            except PdserveError:
                self._count("weights_updates", model, "failed")
                raise
            finally:
                if change.is_paused:
                    change.phase = _PAUSED
                else:
                    await self._end(change)

        return await self._changes.join((model, path, version, mode), update)

    async def pause(self, model: str, mode: str = "", timeout_s: float = 0.0) -> None:
        """Quiesce all workers of a model until `resume`. Requests wait meanwhile, at most for
        `router.queue.timeout_s`. Does nothing if the model is paused. Raises Unavailable."""
        mode, timeout_s = self._checked(mode, timeout_s)

        async def pause() -> None:
            if self._paused(model) is not None:
                return
            change = self._begin(model, timeout_s)
            try:
                await self._quiesce(change, mode, timeout_s)
            except BaseException:
                await self._end(change)
                raise
            change.phase, change.is_paused, change.hold_s = _PAUSED, True, self._config.hold_s

        await self._changes.join((model, "pause", mode), pause)

    async def resume(self, model: str) -> None:
        """End a pause. Does nothing if the model is not paused. Raises Unavailable during an update
        of the paused model."""

        async def resume() -> None:
            if (change := self._paused(model)) is not None:
                await self._end(change)

        await self._changes.join((model, "resume"), resume)

    async def hold(self) -> None:
        """Tell the workers of all changes that this router is there: in each stage some are done
        before others."""
        changes = list(self._open.values())
        await asyncio.gather(*(self._hold_at(m, x) for x in changes for m in x.members))

    async def repair(self) -> None:
        """Repair outdated workers. Runs until cancelled."""
        while True:
            await asyncio.sleep(PERIOD_S)
            now = self._fleet.now()
            self._not_repaired = {x: y for x, y in self._not_repaired.items() if y[0] > now}
            due = [m for m in self._fleet.members.values() if self._is_due(m)]
            await asyncio.gather(*(self._repair(m) for m in due))

    async def keep_held(self) -> None:
        """Call `hold` often enough. Runs until cancelled."""
        while True:
            await asyncio.sleep(self._config.hold_s / 3)
            await self.hold()

    async def keep_paused(self) -> None:
        """Pause workers of paused models that are not. Runs until cancelled."""
        while True:
            await asyncio.sleep(PERIOD_S)
            paused = [x for x in self._open.values() if x.phase == _PAUSED]
            await asyncio.gather(*(self._keep_paused(x) for x in paused))

    async def close(self) -> None:
        """Cancel all changes; their workers resume by themselves."""
        await self._changes.close()

    # -- The stages

    async def _update(
        self, change: _Transaction, path: str, version: str, mode: str, timeout_s: float
    ) -> ModelWeights:
        newest = self._fleet.weights_of(change.model)
        sequence = newest.sequence + 1
        wanted = ModelWeights(sequence, version or str(sequence), path)
        change.version = wanted.version
        logger.info("model %s: update to weights %s from %s", change.model, wanted.version, path)
        weights = await self._prepare(change, wanted)
        if not change.is_paused:
            await self._quiesce(change, mode, timeout_s)
        await self._commit(change, weights)
        return weights

    async def _prepare(self, change: _Transaction, wanted: ModelWeights) -> ModelWeights:
        change.phase = "prepare"
        # One first: it returns the digest that the others must find. It also decides which of two
        # routers goes on, so that both do not refuse each other.
        first, *others = change.members
        weights = await self._prepare_at(first, change, wanted)
        await succeed(self._prepare_at(m, change, weights) for m in others)
        return weights

    async def _quiesce(self, change: _Transaction, mode: str, timeout_s: float) -> None:
        change.phase = "quiesce"
        # Before they report it, so that no answer that leaves one of them begins on another one.
        # Its step would delay the commit.
        for member in change.members:
            updating = f"{self._owner}: {mode}"
            member.reported = structs.replace(member.reported, updating=updating)
        await succeed(self._quiesce_at(m, change, mode, timeout_s) for m in change.members)

    async def _commit(self, change: _Transaction, weights: ModelWeights) -> None:
        change.phase = "commit"
        failed = await errors_of(self._commit_at(m, change) for m in change.members)
        for error in failed:
            logger.warning("model %s: a worker could not load the weights: %s", change.model, error)
        done = len(change.members) - len(failed)
        if not done:
            raise failed[0]
        # Workers that have committed reported it before they answered, so this router sends no
        # request to any other worker.
        text = "model %s: %d workers have weights %s, %d failed"
        logger.info(text, change.model, done, weights.version, len(failed))

    async def _end(self, change: _Transaction) -> None:
        """Let the workers serve again, with the weights that they have."""
        change.phase = "resume"
        try:
            await errors_of(self._resume_at(m, change) for m in change.members)
        finally:
            self._open.pop(change.model, None)

    async def _keep_paused(self, change: _Transaction) -> None:
        """Pause workers of a paused model that have started since, or resumed by themselves."""
        change.members = [m for m in change.members if not m.lost]
        attached = [m for m in self._members(change.model) if m.attached]
        new = [m for m in attached if m not in change.members or not m.reported.updating]
        change.members += [m for m in new if m not in change.members]
        with suppress(PdserveError):
            await succeed(self._quiesce_at(m, change, "keep", 0.0) for m in new)

    def _is_due(self, member: Member) -> bool:
        """Return True if this router should repair an outdated worker now."""
        is_open = member.info.model.name in self._open
        is_free = not (member.lost or member.reported.updating or member.reported.draining)
        failed = member.info.instance_id in self._not_repaired
        return member.is_outdated and member.attached and is_free and not is_open and not failed

    async def _repair(self, member: Member) -> None:
        model = member.info.model.name
        weights = self._fleet.weights_of(model)
        hold_s = self._config.hold_s
        change = _Transaction(model, [member], self._fleet.now(), secrets.token_hex(8), hold_s)
        try:
            await self._prepare_at(member, change, weights)
            await self._quiesce_at(member, change, "keep", 0.0)
            await self._commit_at(member, change)
            logger.info("worker %s joins with weights %s", member.worker_id, weights.version)
        except PdserveError as error:
            until = self._fleet.now() + RETRY_S
            self._not_repaired[member.info.instance_id] = until, error.message
            logger.warning("a worker without the newest weights serves nothing: %s", error.message)
        finally:
            with suppress(PdserveError):
                await self._resume_at(member, change)

    # -- Calls of workers

    async def _prepare_at(
        self, member: Member, change: _Transaction, weights: ModelWeights
    ) -> ModelWeights:
        request = self._request(change, w.WEIGHTS_STAGE_PREPARE)
        request.weights.CopyFrom(wire.weights_to_pb(weights))
        reply = await self._call(member, request, self._config.commit_timeout_s)
        return wire.weights_from_pb(reply.weights)

    async def _quiesce_at(
        self, member: Member, change: _Transaction, mode: str, timeout_s: float
    ) -> None:
        request = self._request(change, w.WEIGHTS_STAGE_QUIESCE)
        request.mode, request.timeout_s = mode, timeout_s
        await self._call(member, request, timeout_s + _QUIESCE_S)

    async def _commit_at(self, member: Member, change: _Transaction) -> None:
        request = self._request(change, w.WEIGHTS_STAGE_COMMIT)
        await self._call(member, request, self._config.commit_timeout_s)

    async def _resume_at(self, member: Member, change: _Transaction) -> None:
        if not member.lost:
            await self._call(member, self._request(change, w.WEIGHTS_STAGE_RESUME), _RESUME_S)

    async def _hold_at(self, member: Member, change: _Transaction) -> None:
        if not member.lost:
            # A worker that is gone shows in the next stage.
            with suppress(PdserveError):
                request = self._request(change, w.WEIGHTS_STAGE_HOLD)
                await self._call(member, request, min(_HOLD_S, self._config.hold_s / 3))

    def _request(self, change: _Transaction, stage: w.WeightsStage) -> w.UpdateWeightsRequest:
        return w.UpdateWeightsRequest(
            transaction=change.id, owner=self._owner, stage=stage, hold_s=change.hold_s
        )

    async def _call(
        self, member: Member, request: w.UpdateWeightsRequest, timeout_s: float
    ) -> w.UpdateWeightsResponse:
        async with worker_stub(self._dialer, member) as stub:
            call = stub.UpdateWeights(request, timeout=timeout_s, metadata=self._dialer.metadata)
            calling = asyncio.ensure_future(call)
            try:
                # A worker that hangs ends no call, and the timeout is that of a load of weights.
                while not (await asyncio.wait({calling}, timeout=PERIOD_S))[0]:
                    if member.lost:
                        raise Unavailable(f"worker {member.worker_id} is lost: {member.gone}")
                return await calling
            finally:
                calling.cancel()

    # -- Checks

    def _paused(self, model: str) -> _Transaction | None:
        """Return the pause of a model, None without one. Raises Unavailable while its weights
        change."""
        change = self._open.get(model)
        if change is not None and change.phase != _PAUSED:
            text = f"the weights of model {model} are being changed (phase {change.phase})"
            raise Unavailable(text, retry_after_s=1.0)
        return change

    def _begin(self, model: str, timeout_s: float) -> _Transaction:
        """Begin a transaction, of which this router has no other for the model. Raises
        Unavailable."""
        members = sorted(self._members(model), key=lambda m: m.worker_id)
        if not members:
            raise Unavailable(f"no worker of model {model} is registered")
        # Some workers wait while the streams of others end.
        hold_s = self._config.hold_s + timeout_s
        change = _Transaction(model, members, self._fleet.now(), secrets.token_hex(8), hold_s)
        self._open[model] = change
        return change

    def _members(self, model: str) -> list[Member]:
        return [m for m in self._fleet.of_model(model, _ALL) if not m.lost]

    def _check_path(self, path: str) -> None:
        """Raise PermissionDenied unless the directory is allowed. Workers check it again, with its
        links resolved."""
        allowed = self._config.directories
        parts = Path(path)
        is_plain = parts.is_absolute() and ".." not in parts.parts
        if not is_plain or not any(parts.is_relative_to(root) for root in allowed):
            text = f"{path!r} is not below router.weights.directories"
            raise PermissionDenied(text, field="weights.path")

    def _checked(self, mode: str, timeout_s: float) -> tuple[str, float]:
        mode = wire.quiesce_mode(mode or self._config.mode)
        if timeout_s < 0:
            raise InvalidRequest(f"timeout_s is {timeout_s:g}", field="timeout_s")
        return mode, timeout_s or self._config.timeout_s
