"""Loads LoRA adapters into all workers of a model, and unloads them.

load     into every worker ─► every worker reports it ─► served; unloaded again if any worker fails
unload   no longer served ─► this router's requests for it end ─► each worker unloads it when no
         request of another router uses it there
repair   a worker that registers later loads the served adapters; until then it gets no requests
         for them

Workers report their adapters to every router. Any router can therefore load and unload, and a
router that restarts learns the served adapters.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from pdserve import wire
from pdserve.errors import InvalidRequest, ModelNotFound, PdserveError, Unavailable
from pdserve.v1 import worker_pb2 as w
from router.control.model_change import ModelChanges, errors_of, succeed
from router.control.worker_rpc import worker_stub

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Mapping

    from pdserve.net.rpc import Dialer
    from pdserve.types import Adapter
    from router.fleet.member import Member
    from router.fleet.registry import Fleet

logger = logging.getLogger(__name__)

LOAD_TIMEOUT_S = 150.0
REPORT_TIMEOUT_S = 15.0
PERIOD_S = 0.25
# Pause of a repair after a failure, because a directory that a worker cannot load would fail each
# period.
RETRY_S = 30.0


class ServedAdapters:
    """The served LoRA adapters, `by_name`. State: the last report of each worker, and the names
    that this router is loading or unloading, which reports do not change."""

    def __init__(self) -> None:
        self._by_name: dict[str, Adapter] = {}
        self._changing: set[str] = set()
        self._reported: dict[Member, Mapping[str, Adapter]] = {}

    @property
    def by_name(self) -> Mapping[str, Adapter]:
        return self._by_name

    def report(self, member: Member, members: Iterable[Member]) -> None:
        """Follow a report of `member`, one of `members`.

        An adapter is served once a worker reports it. If a worker stops reporting it, another
        router is unloading it, and it is no longer served. A revision is served until no worker has
        it.
        """
        before, now = self._reported.get(member, {}), member.reported.adapters
        if before.keys() == now.keys():
            return
        self._reported = {m: m.reported.adapters for m in members if not m.lost}
        gone = before.keys() - now.keys()
        for name in {{**before, **now}[key].name for key in before.keys() ^ now.keys()}:
            if name in self._changing:
                continue
            reports = self._reported.values()
            found = {key: x for each in reports for key, x in each.items() if x.name == name}
            served = self._by_name.pop(name, None)
            if served is not None and (served.key in found or not found):
                # First, so that it stays the served revision. Without a worker, it waits for one.
                found = {served.key: served} | found
            left = [x for key, x in found.items() if key not in gone]
            if left:
                self._by_name[name] = left[0]

    def is_changing(self, name: str) -> bool:
        return name in self._changing

    def begin_change(self, name: str) -> None:
        """Ignore reports of the adapter `name` until `end_change`. Raises Unavailable during
        another change of it."""
        if name in self._changing:
            raise Unavailable(f"adapter {name} is being loaded or unloaded", retry_after_s=1.0)
        self._changing.add(name)

    def end_change(self, name: str) -> None:
        self._changing.discard(name)

    def serve(self, adapter: Adapter) -> None:
        """Serve an adapter; it replaces the one of its name."""
        self._by_name[adapter.name] = adapter

    def remove(self, name: str) -> None:
        del self._by_name[name]


class Adapters:
    """Loads, unloads and repairs adapters. `open_requests` returns the number of open requests by
    the key of their adapter. Each request ends within `request_timeout_s`."""

    def __init__(
        self,
        fleet: Fleet,
        dialer: Dialer,
        served: ServedAdapters,
        open_requests: Callable[[str], int],
        *,
        request_timeout_s: float,
    ) -> None:
        self._fleet, self._dialer, self._served = fleet, dialer, served
        self._open_requests = open_requests
        self._retry_at: dict[str, float] = {}  # time of the next repair, by instance id
        self._unload_timeout_s = request_timeout_s + REPORT_TIMEOUT_S
        self._changes = ModelChanges()

    async def load(self, name: str, path: str, *, model: str = "", replace: bool = False) -> None:
        """Serve the adapter in the directory `path` of the workers' machines under `name`.

        With `replace`, it replaces the adapter of that name, which is then unloaded. Raises
        InvalidRequest or Unavailable, naming the worker, if a worker cannot load it; then nothing
        has changed. The work continues if the caller is cancelled.
        """
        fleet, before = self._fleet, self._served.by_name.get(name)
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
            adapter = await self._load(name, path, base)
            self._served.serve(adapter)
            if before is not None and before.key != adapter.key:
                await self._unload(before)

        await self._change(name, load)

    async def unload(self, name: str) -> None:
        """Stop serving an adapter. Return when its requests have ended and no worker has it.

        Raises ModelNotFound, and Unavailable naming a worker that did not unload it. The work
        continues if the caller is cancelled.
        """
        adapter = self._served.by_name.get(name)
        if adapter is None:
            loaded = ", ".join(sorted(self._served.by_name)) or "none"
            text = f"adapter {name!r} is not loaded; loaded: {loaded}"
            raise ModelNotFound(text, field="lora_name")

        async def unload() -> None:
            self._served.remove(name)
            await self._unload(adapter)

        await self._change(name, unload)

    async def repair(self) -> None:
        """Load served adapters into workers that lack them. Runs until cancelled."""
        while True:
            members = self._fleet.members.values() if self._served.by_name else ()
            self._retry_at = {x: at for x, at in self._retry_at.items() if at > _now()}
            due = [
                m
                for m in members
                if m.attached
                and m.info.limits.max_loras
                and m.info.instance_id not in self._retry_at
            ]
            await asyncio.gather(*(self._repair(m) for m in due))
            await asyncio.sleep(PERIOD_S)

    async def _repair(self, member: Member) -> None:
        for x in list(self._served.by_name.values()):
            is_its = x.model == member.info.model.name and not self._served.is_changing(x.name)
            if is_its and x.key not in member.reported.adapters:
                try:
                    await self._load_at(member, x.name, x.path, x.digest)
                except PdserveError as error:
                    self._retry_at[member.info.instance_id] = _now() + RETRY_S
                    logger.warning(
                        "adapter %s gets no requests on one worker: %s", x.name, error.message
                    )

    async def close(self) -> None:
        """Cancel all loading and unloading."""
        await self._changes.close()

    async def _change(self, name: str, change: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._served.begin_change(name)

        async def run() -> None:
            try:
                await change()
            finally:
                self._served.end_change(name)

        await self._changes.run(run())

    def _workers(self, model: str) -> list[Member]:
        return [m for m in self._fleet.of_model(model) if not m.lost]

    async def _load(self, name: str, path: str, model: str) -> Adapter:
        workers = self._workers(model)
        if not workers:
            raise Unavailable(f"no worker of model {model} is registered")
        before = {m: m.reported.adapters for m in workers}
        # The first worker returns the digest. The others must find the same files.
        adapter = await self._load_at(workers[0], name, path)
        # Undo only what this call loaded: some workers may have had the adapter before.
        lacked = [m for m in workers if adapter.key not in before[m]]
        loading = (self._load_at(m, name, path, adapter.digest) for m in workers[1:])
        if errors := await errors_of(loading):
            await errors_of(self._unload_at(m, adapter.key) for m in lacked)
            raise errors[0]
        # Give up without an error, because a worker that does not report it is about to lose its
        # lease.
        until = _now() + REPORT_TIMEOUT_S
        while any(adapter.key not in m.reported.adapters for m in workers if not m.lost):
            if not await self._fleet.capacity_change(until=until):
                break
        return adapter

    async def _unload(self, adapter: Adapter) -> None:
        until = _now() + self._unload_timeout_s
        # Only this router's requests, because each worker waits for the requests of other routers.
        while requests := self._open_requests(adapter.key):
            if _now() > until:
                raise Unavailable(f"{requests} requests still use adapter {adapter.name}")
            await asyncio.sleep(PERIOD_S)
        holders = [m for m in self._workers(adapter.model) if adapter.key in m.reported.adapters]
        await succeed(self._unload_at(m, adapter.key) for m in holders)

    async def _load_at(self, member: Member, name: str, path: str, digest: str = "") -> Adapter:
        request = w.LoadAdapterRequest(name=name, path=path, digest=digest)
        async with worker_stub(self._dialer, member) as stub:
            loaded = await stub.LoadAdapter(
                request, timeout=LOAD_TIMEOUT_S, metadata=self._dialer.metadata
            )
        return wire.adapter_from_pb(loaded)

    async def _unload_at(self, member: Member, key: str) -> None:
        request, timeout_s = w.UnloadAdapterRequest(adapter=key), self._unload_timeout_s
        async with worker_stub(self._dialer, member) as stub:
            await stub.UnloadAdapter(request, timeout=timeout_s, metadata=self._dialer.metadata)


def _now() -> float:
    return asyncio.get_running_loop().time()
