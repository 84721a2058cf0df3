"""The controller: an actor that makes what runs like what is wanted, once a second.

What is wanted lies in the cluster's key-value store, and what runs is found by the names of actors.
So the controller can die at any time: Ray starts it again, and it goes on.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import msgspec
import ray
from msgspec import Struct
from msgspec.structs import replace
from ray.experimental.internal_kv import (
    _internal_kv_del,
    _internal_kv_get,
    _internal_kv_put,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from pdserve.config import WorkerConfig, parse
from pdserve.deploy.load import Load, RouterLoads
from pdserve.deploy.ray.host import Host
from pdserve.deploy.ray.rollout import Placed, choose_node, next_steps
from pdserve.deploy.ray.spec import ServiceSpec, place_of
from pdserve.deploy.scaling import Bounds, Scaler
from pdserve.discovery import Discovery
from pdserve.errors import PdserveError
from pdserve.security.tls import dialer

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from pdserve.deploy.ray.spec import ProcessSpec

NAMESPACE = "pdserve"
CONTROLLER = "controller"
_KEY = b"pdserve/service"
_GROUP = "pdserve/"  # names of placement groups begin with it
_LOOK_S = 1.0
_ANSWER_S = 3.0
_CONCURRENCY = 16
_MARGIN_S = 15.0
_PENDING = {"ready": False, "doing": "does not answer", "node": ""}


class Service(Struct, frozen=True):
    """What is wanted; during an upgrade also what was wanted before. `nodes` are those on which
    routers ran last: they keep their addresses. `refused` says why the last upgrade was undone."""

    spec: ServiceSpec
    before: ServiceSpec | None = None
    nodes: dict[str, str] = {}
    refused: str = ""


class Controller:
    """State: the service, the actors that exist, and what each said last."""

    def __init__(self, spec: ServiceSpec) -> None:
        stored = _internal_kv_get(_KEY)
        if stored and ray.get_runtime_context().was_current_actor_reconstructed:
            self._service = msgspec.json.decode(stored, type=Service)
        else:
            self._store(Service(spec))
        self._hosts: dict[str, Any] = {}
        self._states: dict[str, dict[str, Any]] = {}
        self._stopping: dict[str, asyncio.Task[None]] = {}
        self._started: dict[str, float] = {}
        self._scalers: dict[str, Scaler] = {}
        self._failure = ""
        self._main = asyncio.get_event_loop().create_task(self._run())

    async def status(self) -> dict[str, Any]:
        """Return the wanted counts and revision, models at zero workers, the state of every
        process, whether an upgrade goes on, why the last one was undone, and why the last look
        failed."""
        service = self._service
        states = {name: self._states.get(name, _PENDING) for name in service.spec.processes()}
        for name in self._hosts.keys() - states.keys():
            states[name] = self._states.get(name, _PENDING)
        for name in self._stopping:
            states[name] = {**states[name], "ready": False, "doing": "stopping"}
        return {
            "counts": service.spec.counts,
            "at_zero": service.spec.at_zero(),
            "processes": dict(sorted(states.items())),
            "revision": service.spec.revision,
            "upgrading": service.before is not None,
            "refused": service.refused,
            "failure": self._failure,
        }

    async def scale(self, counts: Mapping[str, int]) -> None:
        """Change how many workers pools have. Raises ConfigError."""
        self._store(_scaled(self._service, self._service.spec.scaled(counts).counts))

    async def spec(self) -> ServiceSpec:
        return self._service.spec

    async def upgrade(self, spec: ServiceSpec) -> None:
        """Replace what differs, one process of a pool after the other. Raises ConfigError."""
        now = self._service
        to = now.spec.upgraded(spec)
        before = now.before or (None if to == now.spec else now.spec)
        self._store(replace(now, spec=to, before=before, refused=""))
        self._scalers.clear()

    async def down(self) -> None:
        """Stop everything: the routers first, which let open requests finish."""
        self._main.cancel()
        await asyncio.wait((self._main,))
        names = self._find()
        routers = {name for name in names if name.startswith("router-")}
        for part in (routers, names - routers):
            self._stop(part & self._hosts.keys())  # some may have ended meanwhile
            await asyncio.gather(*self._stopping.values())
        self._remove_groups(keep=())
        _internal_kv_del(_KEY)

    def _store(self, service: Service) -> None:
        _internal_kv_put(_KEY, msgspec.json.encode(service))
        self._service = service

    async def _run(self) -> None:
        while True:
            try:
                self._failure = await self._look()
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

    async def _look(self) -> str:
        """Take the next steps. Return why the load is not known, if that is so."""
        self._find()
        running = self._hosts.keys() - self._stopping.keys()
        groups = self._remove_groups(keep=self._hosts)
        await asyncio.gather(*(self._ask(name, groups.get(name)) for name in running))
        ready = {name for name in running if self._states[name]["ready"]}
        routers = {x: self._states[x]["grpc"] for x in ready if x.startswith("router-")}
        addresses = sorted(routers.values())
        # A router that has not answered this controller yet may be one that serves: nobody is told
        # of a list without it.
        is_known = all(self._states[x] is not _PENDING for x in running if x.startswith("router-"))
        places = self._service.spec.warm_places()
        warm = {name for name in running if place_of(name) in places}
        for name in running if addresses and is_known else ():
            state, order = self._states[name], (addresses, name in warm)
            if "routers" in state and (state["routers"], state["warm"]) != order:
                self._hosts[name].tell.remote(*order)
        nodes = {place_of(name): self._states[name]["node_id"] for name in routers}
        if nodes.items() - self._service.nodes.items():
            self._store(replace(self._service, nodes={**self._service.nodes, **nodes}))
        loads, failure = dict[str, Load](), ""
        try:
            loads = await self._measure(addresses)
        except PdserveError as error:
            failure = error.message
        self._scale(loads)
        workers = ready - routers.keys()
        known = warm.union(*(load.ready for load in loads.values()))
        serving = (workers & known) | routers.keys()
        self._end_upgrade(serving)
        wanted = self._service.spec.processes()
        steps = next_steps(wanted.keys(), self._hosts.keys(), serving, settled=workers <= known)
        self._stop(steps.stop)
        placed = [
            Placed(name, group["bundles_to_node_id"][i], bundle)
            for name, group in groups.items()
            for i, bundle in group["bundles"].items()
        ]
        for name in sorted(steps.start):
            self._start(name, wanted[name], placed)
        return failure

    async def _measure(self, routers: Collection[str]) -> dict[str, Load]:
        """Return the load of each model. Raises PdserveError."""
        if not routers:
            return {}
        spec, discovery = self._service.spec, Discovery(tuple(routers))
        section = next(iter(spec.workers.values())).section
        access = dialer(parse(WorkerConfig, section).access, "worker.access")
        models = sorted(set(spec.models.values()))
        measures = (RouterLoads(discovery, access, model).measure() for model in models)
        return dict(zip(models, await asyncio.gather(*measures), strict=True))

    def _scale(self, loads: Mapping[str, Load]) -> None:
        """Follow the load of each model, in the pools that do."""
        spec, now = self._service.spec, time.monotonic()
        counts = dict(spec.counts)
        for model, pools in spec.pools_by_load().items():
            if model not in self._scalers:
                bounds = {role: Bounds(*spec.bounds[pool]) for role, pool in pools.items()}
                present = {role: counts[pool] for role, pool in pools.items()}
                self._scalers[model] = Scaler(bounds, spec.scaling, present)
            needs = loads[model].needs if model in loads else {}
            for role, count in self._scalers[model].decide(needs, now).items():
                counts[pools[role]] = count
        if counts != spec.counts:
            self._store(_scaled(self._service, counts))

    def _end_upgrade(self, serving: Collection[str]) -> None:
        """Note that an upgrade is done; undo it if a new process cannot start."""
        service = self._service
        if service.before is None:
            return
        wanted = service.spec.processes()
        if wanted.keys() == self._hosts.keys() and wanted.keys() <= set(serving):
            self._store(replace(service, before=None))
            return
        now, limit_s = time.monotonic(), service.spec.start_s
        for name in (wanted.keys() - service.before.processes().keys()) & self._hosts.keys():
            state = self._states.get(name, _PENDING)
            is_late = now - self._started.setdefault(name, now) > limit_s and name not in serving
            why = state.get("broken") or (is_late and (state.get("failure") or state["doing"]))
            if why:
                refused = f"{name}: {why}"
                self._store(replace(service, spec=service.before, before=None, refused=refused))
                self._scalers.clear()
                return

    async def _ask(self, name: str, group: Mapping[str, Any] | None) -> None:
        if group is not None and group["state"] != "CREATED":
            needs = ", ".join(f"{n:g} {kind}" for kind, n in group["bundles"][0].items())
            why, count = group["stats"]["scheduling_state"], len(group["bundles"])
            nodes = "a node" if count == 1 else f"{count} nodes, each"
            doing = f"waiting for {nodes} with {needs} free ({why})"
            self._states[name] = {**_PENDING, "doing": doing}
            return
        try:
            self._states[name] = await asyncio.wait_for(
                _answer(self._hosts[name].state.remote()), _ANSWER_S
            )
        except TimeoutError:
            # Its process may be well: what it said last stays.
            self._states.setdefault(name, _PENDING)
        except ray.exceptions.RayError as error:
            self._states[name] = {**_PENDING, "failure": f"{type(error).__name__}"}

    def _remove_groups(self, keep: Collection[str]) -> dict[str, dict[str, Any]]:
        """Remove the placement groups of other processes; return those kept, by name."""
        kept = {}
        for group in ray.util.placement_group_table().values():
            name = group["name"].removeprefix(_GROUP)
            if group["state"] == "REMOVED" or name == group["name"]:
                continue
            if name in keep:
                kept[name] = group
            else:
                ray.util.remove_placement_group(ray.util.get_placement_group(group["name"]))
        return kept

    def _start(self, name: str, spec: ProcessSpec, placed: list[Placed]) -> None:
        """Start an actor in a placement group, and add it to those `placed`. Ray keeps both pending
        until a node has room, as what an autoscaler should add."""
        nodes = {x["NodeID"]: x["Resources"] for x in ray.nodes() if x["Alive"]}
        before = self._service.nodes.get(place_of(name))
        if spec.nnodes > 1:
            before = None  # Ray chooses several
        elif before not in nodes:
            before = choose_node(name, spec.bundle, self._service.spec.strategy, nodes, placed)
        group = ray.util.placement_group(
            [spec.bundle] * spec.nnodes,
            strategy="STRICT_PACK" if spec.nnodes == 1 else "STRICT_SPREAD",
            name=_GROUP + name,
            lifetime="detached",
            _soft_target_node_id=before,
        )
        placed.append(Placed(name, before or "", spec.bundle))
        self._started[name] = time.monotonic()
        self._hosts[name] = (
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
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, 0),
            )
            .remote(name, spec)
        )

    def _stop(self, names: Iterable[str]) -> None:
        for name in set(names) - self._stopping.keys():
            self._stopping[name] = asyncio.create_task(self._end(name))

    async def _end(self, name: str) -> None:
        """Drain a process and remove its actor. An actor that does not answer is killed."""
        host = self._hosts[name]
        try:
            grace_s = await asyncio.wait_for(_answer(host.grace.remote()), _ANSWER_S)
            await asyncio.wait_for(_answer(host.stop.remote()), grace_s + _MARGIN_S)
        except (TimeoutError, ray.exceptions.RayError):
            pass
        finally:
            ray.kill(host)
            self._hosts.pop(name, None)
            self._states.pop(name, None)
            self._stopping.pop(name, None)
            self._started.pop(name, None)


def _answer(reference: Any) -> asyncio.Future[Any]:
    return asyncio.wrap_future(reference.future())


def _scaled(service: Service, counts: dict[str, int]) -> Service:
    """Return the service with other counts, also if an upgrade is undone."""
    before = service.before and replace(service.before, counts=counts)
    return replace(service, spec=replace(service.spec, counts=counts), before=before)
