"""Loads LoRA adapters into all workers of a model, and unloads them.

load     into every worker ─► every worker reports it ─► served; taken back from all if one cannot
unload   not served any more ─► its requests of this router end ─► each worker, when no request
         of another router uses it there
repair   a worker that came later is loaded what is served; until then no request for it goes there

Workers report their adapters to every router, so any router can be asked, and one that restarts
learns what is served.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from pdserve import wire
from pdserve.errors import InvalidRequest, ModelNotFound, PdserveError, Unavailable
from pdserve.v1 import worker_pb2 as w
from router.operations import worker_stub

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable

    from pdserve.types import Adapter
    from router.fleet.member import Member
    from router.fleet.registry import Fleet

logger = logging.getLogger(__name__)

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
        self._tasks: set[asyncio.Task[None]] = set()

    async def load(self, name: str, path: str, *, model: str = "", replace: bool = False) -> None:
        """Serve the adapter in the directory `path` of the workers' machines under `name`; with
        `replace` instead of the one that has that name, which is then unloaded.

        Raises InvalidRequest or Unavailable, naming the worker, if one cannot load it: then nothing
        has changed. Goes on if the caller is cancelled.
        """
        fleet, before = self._fleet, self._fleet.adapters.get(name)
        models = {alias: x.name for x in fleet.models().values() for alias in x.names}
        if name in models:
            raise InvalidRequest(f"{name} is the name of a model", field="lora_name")
        if before is not None and not replace:
            text = f"adapter {name} is loaded already; load_inplace replaces it"
            raise InvalidRequest(text, field="lora_name")
        if not model and len(fleet.models()) != 1:
            served = ", ".join(sorted(fleet.models())) or "none"
            raise InvalidRequest(f"'model' is required; served: {served}", field="model")
        base = models.get(model, model) or next(iter(fleet.models()))

        async def load() -> None:
            fleet.adapters[name] = adapter = await self._load(name, path, base)
            if before is not None and before.key != adapter.key:
                await self._unload(before)

        await self._change(name, load)

    async def unload(self, name: str) -> None:
        """Serve an adapter no more, and return when its requests have ended and no worker has it.
        Raises ModelNotFound, and Unavailable naming a worker that did not unload it. Goes on if the
        caller is cancelled."""
        adapter = self._fleet.adapters.get(name)
        if adapter is None:
            loaded = ", ".join(sorted(self._fleet.adapters)) or "none"
            text = f"adapter {name!r} is not loaded; loaded: {loaded}"
            raise ModelNotFound(text, field="lora_name")

        async def unload() -> None:
            del self._fleet.adapters[name]
            await self._unload(adapter)

        await self._change(name, unload)

    async def repair(self) -> None:
        """Load what is served into workers that lack it. Runs until it is cancelled."""
        while True:
            found = self._fleet.members.values() if self._fleet.adapters else ()
            able = [m for m in found if m.attached and m.info.max_loras]
            await asyncio.gather(*(self._repair(m) for m in able if m.adapters_retry_at <= _now()))
            await asyncio.sleep(PERIOD_S)

    async def _repair(self, member: Member) -> None:
        for x in list(self._fleet.adapters.values()):
            is_its = x.model == member.info.model.name and x.name not in self._fleet.changing
            if is_its and x.key not in member.adapters:
                try:
                    await self._load_at(member, x.name, x.path, x.digest)
                except PdserveError as error:
                    member.adapters_retry_at = _now() + RETRY_S
                    logger.warning("no requests for adapter %s go to %s", x.name, error.message)

    async def close(self) -> None:
        """Cancel what is under way."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _change(self, name: str, change: Callable[[], Coroutine[Any, Any, None]]) -> None:
        changing = self._fleet.changing
        if name in changing:
            raise Unavailable(f"adapter {name} is being loaded or unloaded", retry_after_s=1.0)
        changing.add(name)
        task = asyncio.create_task(change())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: changing.discard(name))
        await asyncio.shield(task)

    def _workers(self, model: str) -> list[Member]:
        return [m for m in self._fleet.of_model(model) if not m.lost]

    async def _load(self, name: str, path: str, model: str) -> Adapter:
        workers = self._workers(model)
        if not workers:
            raise Unavailable(f"no worker of model {model} is registered")
        before = {m: m.adapters for m in workers}
        adapter = await self._load_at(workers[0], name, path)
        lacked = [m for m in workers if adapter.key not in before[m]]
        loading = (self._load_at(m, name, path, adapter.digest) for m in workers[1:])
        if errors := await _errors_of(loading):
            await _errors_of(self._unload_at(m, adapter.key) for m in lacked)
            raise errors[0]
        # A worker that does not report it in time is about to lose its lease.
        until = _now() + REPORT_TIMEOUT_S
        while any(adapter.key not in m.adapters for m in workers if not m.lost):
            if not await self._fleet.capacity_change(until=until):
                break
        return adapter

    async def _unload(self, adapter: Adapter) -> None:
        until = _now() + self._unload_timeout_s
        while requests := self._open_requests(adapter.key):
            if _now() > until:
                raise Unavailable(f"{requests} requests still use adapter {adapter.name}")
            await asyncio.sleep(PERIOD_S)
        holders = [m for m in self._workers(adapter.model) if adapter.key in m.adapters]
        if errors := await _errors_of(self._unload_at(m, adapter.key) for m in holders):
            raise errors[0]

    async def _load_at(self, member: Member, name: str, path: str, digest: str = "") -> Adapter:
        request = w.LoadAdapterRequest(name=name, path=path, digest=digest)
        async with worker_stub(self._fleet, member) as stub:
            loaded = await stub.LoadAdapter(
                request, timeout=LOAD_TIMEOUT_S, metadata=self._fleet.dialer.metadata
            )
        return wire.adapter_from_pb(loaded)

    async def _unload_at(self, member: Member, key: str) -> None:
        request, timeout_s = w.UnloadAdapterRequest(adapter=key), self._unload_timeout_s
        async with worker_stub(self._fleet, member) as stub:
            await stub.UnloadAdapter(
                request, timeout=timeout_s, metadata=self._fleet.dialer.metadata
            )


async def _errors_of(actions: Iterable[Coroutine[Any, Any, object]]) -> list[BaseException]:
    results = await asyncio.gather(*actions, return_exceptions=True)
    return [x for x in results if isinstance(x, BaseException)]


def _now() -> float:
    return asyncio.get_running_loop().time()
