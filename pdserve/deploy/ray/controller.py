"""The controller: an actor that reconciles the running processes with the wanted service, once per
second.

The wanted service is in the cluster's key-value store, and running processes are found by the names
of their actors. The controller may therefore die at any time: Ray restarts it, and it continues.
"""

from __future__ import annotations

import asyncio
import dataclasses
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
from pdserve.deploy.crash_loops import report_crash_loops
from pdserve.deploy.ray.host import Host
from pdserve.deploy.ray.rollout import Placed, choose_node, next_steps
from pdserve.deploy.ray.spec import ServiceSpec, new_secrets, place_of, pool_of, role_of
from pdserve.deploy.scaling.load import Load, RouterLoads
from pdserve.deploy.scaling.scaler import Bounds, Scaler
from pdserve.errors import PdserveError
from pdserve.net.discovery import Discovery
from pdserve.security.tls import dialer
from pdserve.types import Role
from pdserve.v1 import worker_pb2 as w
from pdserve.wire import role_to_pb

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from pdserve.deploy.ray.spec import ProcessSpec
    from pdserve.net.rpc import Dialer

NAMESPACE = "pdserve"
CONTROLLER = "controller"
_KEY = b"pdserve/service"
_GROUP = "pdserve/"  # prefix of the names of placement groups
_LOOK_S = 1.0
_ANSWER_S = 3.0
_CONCURRENCY = 16
_MARGIN_S = 15.0
_PENDING = {"ready": False, "doing": "does not answer", "node": ""}


class WantedService(Struct, frozen=True):
    """The wanted service. `before`: the spec before an upgrade in progress. `nodes`: the last node
    of each router, so that routers keep their addresses. `refused`: why the last upgrade was rolled
    back. `secrets`: credentials created because none are configured; kept while the service runs.
    """

    spec: ServiceSpec
    before: ServiceSpec | None = None
    nodes: dict[str, str] = {}
    refused: str = ""
    secrets: dict[str, str] = {}


class Controller:
    """The controller's actor. State: the service, the existing actors, and their last reported
    states."""

    def __init__(self, spec: ServiceSpec) -> None:
        stored = _internal_kv_get(_KEY)
        if stored and ray.get_runtime_context().was_current_actor_reconstructed:
            self._service = msgspec.json.decode(stored, type=WantedService)
        else:
            self._store(WantedService(spec, secrets=new_secrets(spec)))
        self._hosts: dict[str, Any] = {}
        self._states: dict[str, dict[str, Any]] = {}
        self._stopping: dict[str, asyncio.Task[None]] = {}
        self._started: dict[str, float] = {}
        self._scalers: dict[str, Scaler] = {}
        self._failure = ""
        self._main = asyncio.get_event_loop().create_task(self._run())

    async def status(self) -> dict[str, Any]:
        """Return the wanted counts and revision, the models at zero workers, the state of every
        process, whether an upgrade is in progress, why the last one was rolled back, and why the
        last look failed."""
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
        """Change the numbers of workers of pools. Raises ConfigError."""
        self._store(_scaled(self._service, self._service.spec.scaled(counts).counts))

    async def spec(self) -> ServiceSpec:
        return self._service.spec

    async def secrets(self) -> dict[str, str]:
        return self._service.secrets

    async def upgrade(self, spec: ServiceSpec) -> None:
        """Replace the processes whose spec differs, one at a time in each pool. Raises
        ConfigError."""
        now = self._service
        to = now.spec.upgraded(spec)
        before = now.before or (None if to == now.spec else now.spec)
        self._store(replace(now, spec=to, before=before, refused=""))
        self._scalers.clear()  # bounds and scaling rules may differ

    async def down_s(self) -> float:
        """Return how long `down` may take: the routers, then the others, each with its grace."""
        found = await asyncio.gather(
            *(
                asyncio.wait_for(_answer(host.grace.remote()), _ANSWER_S)
                for host in self._hosts.values()
            ),
            return_exceptions=True,  # an actor that does not answer is killed
        )
        longest = max((x for x in found if not isinstance(x, BaseException)), default=0.0)
        return float(2 * (longest + _MARGIN_S + _ANSWER_S))

    async def down(self) -> None:
        """Stop all processes. Routers stop first, so that open requests finish on their workers."""
        self._main.cancel()
        await asyncio.wait((self._main,))
        names = self._find()
        routers = {name for name in names if name.startswith("router-")}
        for part in (routers, names - routers):
            self._stop(part & self._hosts.keys())  # some may have ended since
            await asyncio.gather(*self._stopping.values())
        self._remove_groups(keep=())
        _internal_kv_del(_KEY)

    def _store(self, service: WantedService) -> None:
        _internal_kv_put(_KEY, msgspec.json.encode(service))
        self._service = service

    async def _run(self) -> None:
        while True:
            try:
                self._failure = await self._look()
            # Ray raises ValueError if an actor of this name exists or is still being removed. A
            # credential that cannot be read on this node now is a PdserveError.
            except (ray.exceptions.RayError, PdserveError, ValueError, OSError) as error:
                self._failure = f"{type(error).__name__}: {error}"
            await asyncio.sleep(_LOOK_S)

    def _find(self) -> set[str]:
        """Adopt actors that this controller started before a restart. Return all names."""
        for found in ray.util.list_named_actors(all_namespaces=True):
            name = found["name"]
            if found["namespace"] == NAMESPACE and name != CONTROLLER and name not in self._hosts:
                self._hosts[name] = ray.get_actor(name, namespace=NAMESPACE)
        return set(self._hosts)

    async def _look(self) -> str:
        """Take the next steps of reconciliation. Return why the load is unknown, or ""."""
        self._find()
        running = self._hosts.keys() - self._stopping.keys()
        groups = self._remove_groups(keep=self._hosts)
        await asyncio.gather(*(self._ask(name, groups.get(name)) for name in running))
        ready = {name for name in running if self._states[name]["ready"]}
        routers = {x: self._states[x]["grpc"] for x in ready if x.startswith("router-")}
        addresses = sorted(routers.values())
        # A router that has not answered this controller yet may be serving. Until all have
        # answered, no worker gets a list of routers, because the list could lack one.
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
        await report_crash_loops(self._dialer(), addresses, list(self._crash_loops(running)))
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
        discovery = Discovery(tuple(routers))
        models = sorted(set(self._service.spec.models.values()))
        measures = (RouterLoads(discovery, self._dialer(), x).measure() for x in models)
        return dict(zip(models, await asyncio.gather(*measures), strict=True))

    def _dialer(self) -> Dialer:
        """Return the dialer for connections to routers, with a worker's credentials."""
        section = next(iter(self._service.spec.workers.values())).section
        found = dialer(parse(WorkerConfig, section).access, "worker.access")
        token = "" if found.tokens else self._service.secrets.get("worker_token_file", "")
        return dataclasses.replace(found, token=token)

    def _crash_loops(self, names: Iterable[str]) -> Iterator[w.CrashLoop]:
        for name in names:
            reason, model = self._states[name].get("crash_loop"), self._model_of(name)
            if reason and model:
                role = role_to_pb(Role(role_of(name)))
                yield w.CrashLoop(worker_id=name, role=role, model=model, reason=reason)

    def _model_of(self, name: str) -> str:
        """Return the model of a worker, or "" for a router and for a worker of a removed pool."""
        return self._service.spec.models.get(pool_of(place_of(name)), "")

    def _scale(self, loads: Mapping[str, Load]) -> None:
        """Scale the pools that follow the load of their model."""
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
        """Finish an upgrade whose processes all serve. Roll it back if a new process cannot
        start."""
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
            places = "a node" if count == 1 else f"{count} places on nodes, each"
            doing = f"waiting for {places} with {needs} free ({why})"
            self._states[name] = {**_PENDING, "doing": doing}
            return
        try:
            self._states[name] = await asyncio.wait_for(
                _answer(self._hosts[name].state.remote()), _ANSWER_S
            )
        except TimeoutError:
            # The process may be healthy although its actor is slow: keep its last state.
            self._states.setdefault(name, _PENDING)
        except ray.exceptions.RayError as error:
            self._states[name] = {**_PENDING, "failure": f"{type(error).__name__}"}

    def _remove_groups(self, keep: Collection[str]) -> dict[str, dict[str, Any]]:
        """Remove all placement groups except for processes in `keep`. Return the kept ones by
        process name."""
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
        """Start an actor in a placement group, and append it to `placed`. Until a node has room,
        Ray keeps both pending, which makes its autoscaler add a node."""
        nodes = {x["NodeID"]: x["Resources"] for x in ray.nodes() if x["Alive"]}
        before = self._service.nodes.get(place_of(name))
        if spec.parts > 1:
            before = None  # Ray chooses the nodes of a worker or group with several
        elif before not in nodes:
            before = choose_node(name, spec.bundle, self._service.spec.strategy, nodes, placed)
        # Detached groups and actors outlive this controller, which adopts them after a restart.
        strategy = "STRICT_PACK" if spec.parts == 1 else "PACK"
        group = ray.util.placement_group(
            [spec.bundle] * spec.parts,
            strategy="STRICT_SPREAD" if spec.nnodes > 1 else strategy,
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
            .remote(name, spec, self._service.secrets, self._service.spec.max_restart_pause_s)
        )

    def _stop(self, names: Iterable[str]) -> None:
        for name in set(names) - self._stopping.keys():
            self._stopping[name] = asyncio.create_task(self._end(name))

    async def _end(self, name: str) -> None:
        """Drain a process and remove its actor. Kill an actor that does not answer in time."""
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


def _scaled(service: WantedService, counts: dict[str, int]) -> WantedService:
    """Return the service with other counts. They also apply if an upgrade is rolled back."""
    before = service.before and replace(service.before, counts=counts)
    return replace(service, spec=replace(service.spec, counts=counts), before=before)
