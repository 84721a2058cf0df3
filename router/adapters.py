"""Loads LoRA adapters into all workers of a model, and unloads them.

load     into every worker ─► all report the same digest ─► served; else taken back from all
unload   not served any more ─► its requests of this router end ─► each worker, when no request
         of another router uses it there
repair   a worker that came later is loaded what is served; until then no request for it goes there

Workers report their adapters to every router, so any router can be asked, and one that restarts
learns what is served.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from pdserve import wire
from pdserve.errors import Conflict, InvalidRequest, ModelNotFound, PdserveError, Unavailable
from pdserve.v1 import worker_pb2 as w
from router.operations import worker_stub

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence

    from pdserve.types import Adapter
    from router.fleet.member import Member
    from router.fleet.registry import Fleet

logger = logging.getLogger(__name__)

T = TypeVar("T")

LOAD_TIMEOUT_S = 150.0
REPORT_TIMEOUT_S = 15.0
PERIOD_S = 0.25
RETRY_S = 30.0


class Adapters:
    """`open_requests` counts them by the key of their adapter. Each request ends within
    `request_timeout_s`."""

    def __init__(
        self, fleet: Fleet, open_requests: Callable[[str], int], *, request_timeout_s: float
    ) -> None:
        self._fleet = fleet
        self._open_requests = open_requests
        self._unload_timeout_s = request_timeout_s + REPORT_TIMEOUT_S
        self._tasks: set[asyncio.Task[Any]] = set()

    async def load(self, name: str, path: str, *, model: str = "", replace: bool = False) -> None:
        """Serve the adapter in the directory `path` of the workers' machines under `name`; with
        `replace` instead of the one that has that name, which is then unloaded. Goes on if the
        caller is cancelled.

        Raises InvalidRequest or Unavailable, naming the worker, if one cannot load it: then nothing
        has changed.
        """
        fleet = self._fleet
        before = fleet.adapters.get(name)
        models = {alias: x.name for x in fleet.models().values() for alias in x.names}
        if name in models:
            raise InvalidRequest(f"{name} is the name of a model", field="lora_name")
        if before is not None and not replace:
            text = f"adapter {name} is loaded already; load_inplace replaces it"
            raise InvalidRequest(text, field="lora_name")
        model = models.get(model, model) or (before.model if before else self._only_model())
        if before is not None and before.model != model:
            text = f"adapter {name} is one of model {before.model}"
            raise InvalidRequest(text, field="model")

        async def load() -> None:
            with self._changing(name):
                fleet.adapters[name] = await self._load(name, path, model)
                if before is not None and before != fleet.adapters[name]:
                    await self._unload(before)

        await self._to_its_end(load())

    async def unload(self, name: str) -> None:
        """Serve an adapter no more, and return when its requests have ended and no worker has it.
        Goes on if the caller is cancelled. Raises ModelNotFound, and Unavailable naming a worker
        that did not unload it."""
        adapter = self._fleet.adapters.get(name)
        if adapter is None:
            loaded = ", ".join(sorted(self._fleet.adapters)) or "none"
            raise ModelNotFound(
                f"adapter {name!r} is not loaded; loaded: {loaded}", field="lora_name"
            )

        async def unload() -> None:
            with self._changing(name):
                del self._fleet.adapters[name]
                await self._unload(adapter)

        await self._to_its_end(unload())

    async def repair(self) -> None:
        """Load what is served into workers that lack it. Runs until it is cancelled."""
        while True:
            lacking = dict(self._lacking())
            await asyncio.gather(*(self._repair(m, adapter) for m, adapter in lacking.items()))
            await asyncio.sleep(PERIOD_S)

    async def close(self) -> None:
        """Cancel what is under way."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _lacking(self) -> Iterator[tuple[Member, Adapter]]:
        for adapter in self._fleet.adapters.values():
            for member in self._workers(adapter.model):
                is_due = member.adapters_retry_at <= _now()
                is_able = is_due and member.attached and member.info.max_loras
                if is_able and adapter.key not in member.adapters:
                    yield member, adapter

    async def _repair(self, member: Member, adapter: Adapter) -> None:
        if adapter.name in self._fleet.changing:
            return
        try:
            await self._load_at(member, adapter.name, adapter.path, adapter.digest)
        except PdserveError as error:
            member.adapters_retry_at = _now() + RETRY_S
            logger.warning("worker %s gets no requests for it: %s", member.worker_id, error.message)

    def _only_model(self) -> str:
        models = sorted(self._fleet.models())
        if len(models) != 1:
            served = ", ".join(models) or "none"
            raise InvalidRequest(f"'model' is required; served: {served}", field="model")
        return models[0]

    def _workers(self, model: str) -> Sequence[Member]:
        return [m for m in self._fleet.of_model(model) if not m.lost]

    @contextmanager
    def _changing(self, name: str) -> Iterator[None]:
        if name in self._fleet.changing:
            raise Conflict(f"adapter {name} is being loaded or unloaded", retry_after_s=1.0)
        self._fleet.changing.add(name)
        try:
            yield
        finally:
            self._fleet.changing.discard(name)

    async def _to_its_end(self, action: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(action)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        await asyncio.shield(task)

    async def _load(self, name: str, path: str, model: str) -> Adapter:
        workers = self._workers(model)
        if not workers:
            raise Unavailable(f"no worker of model {model} is registered")
        had = {m: set(m.adapters) for m in workers}
        results = await _at_each(workers, lambda m: self._load_at(m, name, path))
        found = {m: x for m, x in results.items() if not isinstance(x, PdserveError)}
        errors = [x for x in results.values() if isinstance(x, PdserveError)]
        if not errors and len({x.key for x in found.values()}) > 1:
            digests = ", ".join(f"{m.worker_id}: {x.digest}" for m, x in found.items())
            text = f"the files in {path} differ between workers ({digests})"
            errors.append(InvalidRequest(text, field="lora_path"))
        if not errors:
            adapter = next(iter(found.values()))
            try:
                async with asyncio.timeout(REPORT_TIMEOUT_S):
                    while any(adapter.key not in m.adapters for m in workers if not m.lost):
                        await self._fleet.capacity_change()
                return adapter
            except TimeoutError:
                errors.append(Unavailable(f"not every worker reported adapter {name}"))
        taken = [m for m, x in found.items() if x.key not in had[m]]
        await _at_each(taken, lambda m: self._unload_at(m, found[m].key))
        raise errors[0]

    async def _unload(self, adapter: Adapter) -> None:
        until = _now() + self._unload_timeout_s
        while requests := self._open_requests(adapter.key):
            if _now() > until:
                raise Unavailable(f"{requests} requests still use adapter {adapter.name}")
            await asyncio.sleep(PERIOD_S)
        holders = [m for m in self._workers(adapter.model) if adapter.key in m.adapters]
        results = await _at_each(holders, lambda m: self._unload_at(m, adapter.key))
        for error in results.values():
            if error is not None:
                raise error

    async def _load_at(self, member: Member, name: str, path: str, digest: str = "") -> Adapter:
        request = w.LoadAdapterRequest(name=name, path=path, digest=digest)
        async with worker_stub(self._fleet, member) as stub:
            loaded = await stub.LoadAdapter(
                request, timeout=LOAD_TIMEOUT_S, metadata=self._fleet.dialer.metadata
            )
        return wire.adapter_from_pb(loaded)

    async def _unload_at(self, member: Member, key: str) -> None:
        async with worker_stub(self._fleet, member) as stub:
            await stub.UnloadAdapter(
                w.UnloadAdapterRequest(adapter=key),
                timeout=self._unload_timeout_s,
                metadata=self._fleet.dialer.metadata,
            )


async def _at_each(
    workers: Sequence[Member], action: Callable[[Member], Coroutine[Any, Any, T]]
) -> Mapping[Member, T | PdserveError]:
    """Return what `action` returns for each worker, or its error, which names the worker."""

    async def at(member: Member) -> T | PdserveError:
        try:
            return await action(member)
        except PdserveError as error:
            text = f"worker {member.worker_id}: {error.message}"
            return type(error)(text, field=error.field, retry_after_s=error.retry_after_s)

    return dict(zip(workers, await asyncio.gather(*map(at, workers)), strict=True))


def _now() -> float:
    return asyncio.get_running_loop().time()
