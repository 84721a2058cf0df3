"""The controller: an actor that makes what runs like what is wanted, once a second.

What is wanted lies in the cluster's key-value store, and what runs is found by the names of actors.
So the controller can die at any time: Ray starts it again, and it goes on.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec
import ray
from ray.experimental.internal_kv import (
    _internal_kv_del,
    _internal_kv_get,
    _internal_kv_put,
)

from pdserve.deploy.ray.host import Host
from pdserve.deploy.ray.spec import ServiceSpec

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pdserve.deploy.ray.spec import ProcessSpec

NAMESPACE = "pdserve"
CONTROLLER = "controller"
_KEY = b"pdserve/service"
_LOOK_S = 1.0
_ANSWER_S = 3.0
_CONCURRENCY = 16
_MARGIN_S = 15.0


class Controller:
    """State: what is wanted, the actors that exist, and what each said last."""

    def __init__(self, spec: ServiceSpec) -> None:
        stored = _internal_kv_get(_KEY)
        if stored and ray.get_runtime_context().was_current_actor_reconstructed:
            spec = msgspec.json.decode(stored, type=ServiceSpec)
        self._spec = spec
        self._store()
        self._hosts: dict[str, Any] = {}
        self._states: dict[str, dict[str, Any]] = {}
        self._stopping: dict[str, asyncio.Task[None]] = {}
        self._failure = ""
        self._main = asyncio.get_event_loop().create_task(self._run())

    async def status(self) -> dict[str, Any]:
        """Return the wanted counts, the state of every process, and why the last look failed."""
        known = {name: self._states.get(name, _pending()) for name in self._spec.processes()}
        leaving = {name: {**_pending(), "doing": "stopping"} for name in self._stopping}
        states = {**known, **leaving}
        return {"counts": self._spec.counts, "processes": states, "failure": self._failure}

    async def scale(self, counts: Mapping[str, int]) -> None:
        """Change how many workers roles have. Raises ConfigError."""
        self._spec = self._spec.scaled(counts)
        self._store()

    async def down(self) -> None:
        """Stop everything: the routers first, which let open requests finish."""
        self._main.cancel()
        await asyncio.wait((self._main,))
        names = self._find()
        for part in (set(self._spec.routers), names - set(self._spec.routers)):
            self._stop(part & names)
            await asyncio.gather(*self._stopping.values())
        _internal_kv_del(_KEY)

    def _store(self) -> None:
        _internal_kv_put(_KEY, msgspec.json.encode(self._spec))

    async def _run(self) -> None:
        while True:
            try:
                await self._look()
                self._failure = ""
            # ValueError: an actor of this name exists, or is still being removed.
            except (ray.exceptions.RayError, ValueError, OSError) as error:
                self._failure = f"{type(error).__name__}: {error}"
            await asyncio.sleep(_LOOK_S)

    def _find(self) -> set[str]:
        """Adopt the actors that an earlier life of this controller started; return all names."""
        for found in ray.util.list_named_actors(all_namespaces=True):
            name = found["name"]
            if found["namespace"] == NAMESPACE and name != CONTROLLER and name not in self._hosts:
                self._hosts[name] = ray.get_actor(name, namespace=NAMESPACE)
        return set(self._hosts)

    async def _look(self) -> None:
        self._find()
        wanted = self._spec.processes()
        self._stop(self._hosts.keys() - wanted.keys())
        for name in wanted.keys() - self._hosts.keys():
            self._hosts[name] = _start(name, wanted[name])
        serving = self._hosts.keys() - self._stopping.keys()
        await asyncio.gather(*(self._ask(name) for name in serving))
        states = {name: self._states[name] for name in self._spec.routers if name in self._states}
        routers = sorted(x["grpc"] for x in states.values() if x["ready"])
        for name in serving - self._spec.routers.keys():
            state = self._states.get(name, {})
            if routers and state.get("routers", routers) != routers:
                self._hosts[name].set_routers.remote(routers)

    async def _ask(self, name: str) -> None:
        try:
            self._states[name] = await asyncio.wait_for(
                asyncio.wrap_future(self._hosts[name].state.remote().future()), _ANSWER_S
            )
        except TimeoutError:
            self._states[name] = _pending()
        except ray.exceptions.RayError as error:
            self._states[name] = {**_pending(), "failure": f"{type(error).__name__}"}

    def _stop(self, names: Iterable[str]) -> None:
        for name in set(names) - self._stopping.keys():
            self._stopping[name] = asyncio.create_task(self._end(name))

    async def _end(self, name: str) -> None:
        """Drain a process and remove its actor. An actor that does not answer is killed."""
        host = self._hosts[name]
        known = self._spec.routers.get(name) or self._spec.workers[name.rpartition("-")[0]]
        ended = host.stop.remote().future()
        try:
            await asyncio.wait_for(asyncio.wrap_future(ended), known.grace_s + _MARGIN_S)
        except (TimeoutError, ray.exceptions.RayError):
            pass
        finally:
            ray.kill(host)
            self._hosts.pop(name, None)
            self._states.pop(name, None)
            self._stopping.pop(name, None)


def _pending() -> dict[str, Any]:
    return {"ready": False, "doing": "waiting for a node with room, or for an answer", "node": ""}


def _start(name: str, spec: ProcessSpec) -> Any:
    """Start an actor. Ray spreads actors over nodes, and keeps it pending until one has room."""
    return (
        ray.remote(Host)
        .options(
            name=name,
            namespace=NAMESPACE,
            lifetime="detached",
            max_restarts=-1,
            max_task_retries=0,
            max_concurrency=_CONCURRENCY,
            num_cpus=spec.cpus,
            num_gpus=spec.gpus,
            scheduling_strategy="SPREAD",
        )
        .remote(name, spec)
    )
