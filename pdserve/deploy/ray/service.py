"""The commands with `--on ray`. They call the controller, and `up` starts it."""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING, Any

from pdserve.errors import ConfigError, Unavailable
from pdserve.security import local

try:
    import ray
except ImportError as error:
    raise ConfigError(f"--on ray needs Ray ({error}): pip install 'pdserve[ray]'") from error

from pdserve.deploy.ray.controller import CONTROLLER, NAMESPACE, Controller

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pdserve.deploy.ray.spec import ServiceSpec

_ANSWER_S = 30.0
_LOOK_S = 0.5
_KEEPS = ("RAY_gcs_storage", "RAY_REDIS_ADDRESS")


@contextlib.contextmanager
def joined() -> Iterator[None]:
    """Join the cluster at RAY_ADDRESS, or this machine's if that is not set. Raises Unavailable."""
    try:
        ray.init(
            address=os.environ.get("RAY_ADDRESS", "auto"),
            namespace=NAMESPACE,
            log_to_driver=False,
            configure_logging=False,
        )
    except (ConnectionError, RuntimeError) as error:
        raise Unavailable(f"no Ray cluster: {error}") from error
    try:
        yield
    except (ray.exceptions.GetTimeoutError, ray.exceptions.RayActorError) as error:
        raise Unavailable(f"the controller on Ray does not answer: {error}") from error
    finally:
        ray.shutdown()


def head_keeps_state() -> bool:
    """Return True if the head's state survives a restart, because GCS uses RocksDB or Redis."""
    head = next(x["NodeID"] for x in ray.nodes() if "node:__internal_head__" in x["Resources"])
    at = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(head, soft=False)
    found: Mapping[str, str] = ray.get(
        ray.remote(_storage_variables).options(num_cpus=0, scheduling_strategy=at).remote(),
        timeout=_ANSWER_S,
    )
    return found.get("RAY_gcs_storage") == "rocksdb" or bool(found.get("RAY_REDIS_ADDRESS"))


def _storage_variables() -> dict[str, str]:
    return {name: os.environ[name] for name in _KEEPS if name in os.environ}


def start(spec: ServiceSpec, *, allow_fragile_head: bool) -> None:
    """Start a service. Raises ConfigError if one is running, or if the cluster would lose its state
    when the head restarts."""
    with contextlib.suppress(Unavailable):
        _controller()
        raise ConfigError("a service runs on this cluster: scale it, or `pdserve down --on ray`")
    if not allow_fragile_head and not head_keeps_state():
        raise ConfigError(
            "when the head of this Ray cluster restarts, it forgets everything and every process "
            "of the service ends. Start it with RAY_gcs_storage=rocksdb (or Redis), or pass "
            "--allow-fragile-head"
        )
    ray.remote(Controller).options(
        name=CONTROLLER,
        namespace=NAMESPACE,
        lifetime="detached",
        max_restarts=-1,
        num_cpus=0,
    ).remote(spec)


def until_ready(limit_s: float) -> dict[str, Any]:
    """Wait until every process is ready and return the status. Raises Unavailable after
    `limit_s`."""
    until = time.monotonic() + limit_s
    while True:
        found = status()
        late = {name: x for name, x in found["processes"].items() if not x["ready"]}
        if not late:
            return found
        if time.monotonic() > until:
            why = ", ".join(f"{n}: {x.get('failure') or x['doing']}" for n, x in late.items())
            raise Unavailable(
                f"not ready after {limit_s:g} s: {why}. The service stays; "
                "`pdserve down --on ray` ends it"
            )
        time.sleep(_LOOK_S)


def status() -> dict[str, Any]:
    """Return the controller's status. Retry for _ANSWER_S, because Ray restarts a killed
    controller."""
    until = time.monotonic() + _ANSWER_S
    while True:
        try:
            found: dict[str, Any] = ray.get(_controller().status.remote(), timeout=_ANSWER_S)
            return found
        except ray.exceptions.RayActorError:
            if time.monotonic() > until:
                raise
            time.sleep(_LOOK_S)


def scale(counts: Mapping[str, int]) -> None:
    """Change the counts of roles. Raises ConfigError."""
    _order("scale", dict(counts))


def spec() -> ServiceSpec:
    """Return the spec of the wanted service."""
    found: ServiceSpec = ray.get(_controller().spec.remote(), timeout=_ANSWER_S)
    return found


def upgrade(to: ServiceSpec) -> dict[str, Any]:
    """Replace the processes whose spec differs. Return the status when all are replaced. The
    controller rolls back an upgrade whose processes do not start in time. Raises ConfigError if the
    upgrade is rejected or rolled back."""
    _order("upgrade", to)
    while (found := status())["upgrading"]:
        time.sleep(_LOOK_S)
    if found["refused"]:
        raise ConfigError(f"the upgrade was undone: {found['refused']}")
    if found["revision"] != to.revision:
        raise Unavailable("another upgrade has replaced this one")
    return found


def _order(method: str, *args: Any) -> None:
    """Call the controller. Raises ConfigError."""
    try:
        ray.get(getattr(_controller(), method).remote(*args), timeout=_ANSWER_S)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, ConfigError):
            raise ConfigError(error.cause.message) from error
        raise


def announce(found: Mapping[str, Any]) -> None:
    """Store the administrator's key of the routers in a status where commands of this user find
    it."""
    secrets: dict[str, str] = ray.get(_controller().secrets.remote(), timeout=_ANSWER_S)
    for address in _addresses(found) if secrets else ():
        with contextlib.suppress(OSError, RuntimeError):  # no home directory
            local.announce(address, secrets["admin_key_file"])


def _addresses(found: Mapping[str, Any]) -> list[str]:
    return [state["grpc"] for state in found["processes"].values() if "http" in state]


def down() -> None:
    """Stop the service with all its processes and actors."""
    controller = _controller()
    for address in _addresses(status()):
        local.withdraw(address)
    limit_s = ray.get(controller.down_s.remote(), timeout=_ANSWER_S)
    ray.get(controller.down.remote(), timeout=limit_s + _ANSWER_S)
    ray.kill(controller)


def _controller() -> Any:
    try:
        return ray.get_actor(CONTROLLER, namespace=NAMESPACE)
    except ValueError as error:
        raise Unavailable("no service on this Ray cluster: `pdserve up --on ray`") from error
