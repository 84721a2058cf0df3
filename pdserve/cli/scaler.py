"""`pdserve scaler` and `pdserve operator`: the workers on Kubernetes follow load and changes."""

from __future__ import annotations

import argparse
import logging
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pdserve.cli.options import (
    KEY_VARIABLE,
    add_command,
    add_config_options,
    config_from,
    until_stopped,
)
from pdserve.config import refuse
from pdserve.deploy.scaling.load import RouterLoads
from pdserve.deploy.scaling.scaler import Bounds
from pdserve.deploy.scaling.weights import RouterWeights
from pdserve.errors import (
    ClientError,
    ConfigError,
    PdserveError,
    PermissionDenied,
    Unauthenticated,
)
from pdserve.net.discovery import Discovery
from pdserve.observe.logs import log_to_stderr
from pdserve.security.tls import dialer
from pdserve.types import Role

if TYPE_CHECKING:
    from pdserve.cli.options import Subparsers
    from pdserve.config import WorkerConfig
    from pdserve.deploy.kubernetes.lease import LeaderLease

_ROLES = (Role.PREFILL, Role.DECODE)
_SCALING = {
    "--target-load": "up.scaling.target_load",
    "--up-after": "up.scaling.up_after_s",
    "--down-after": "up.scaling.down_after_s",
    "--to-zero-after": "up.scaling.to_zero_after_s",
}


def register(commands: Subparsers) -> None:
    parser = add_command(
        commands,
        "scaler",
        _run,
        "scale the workers on Kubernetes by load",
        "Ask the routers of worker.routers for the load of the model that worker.model and "
        "worker.model_names name, and set the replicas of its pools. Several such processes "
        "elect a leader with a Lease. Nothing else may set the replicas.",
    )
    text = "the cluster of this pod, or of KUBECONFIG"
    parser.add_argument("--on", choices=("kubernetes",), required=True, help=text)
    for role in _ROLES:
        text = f"minimum and maximum number of {role} workers"
        parser.add_argument(f"--{role}", type=_bounds, metavar="LEAST:MOST", help=text)
    parser.add_argument(
        "--target",
        action="append",
        default=[],
        metavar="ROLE=TYPE.VERSION.GROUP/NAME",
        help="has a role's replicas (default: deployments.v1.apps/pdserve-ROLE); repeatable",
    )
    text = "name of the Lease (default: %(default)s)"
    parser.add_argument("--lease", default="pdserve-scaler", metavar="NAME", help=text)
    operator = add_command(
        commands,
        "operator",
        _operate,
        "roll out workers on Kubernetes by canary",
        "Reconcile the PDService resources of this namespace, or of KUBECONFIG's: new pods of a "
        "changed template get a growing share of requests, and replace the old ones or are "
        "removed, depending on failures and SLOs. Routers are found by worker.routers; if they "
        f"require a key, set {KEY_VARIABLE} to an admin's. Several such processes elect a leader.",
    )
    routers = {"--router": "worker.routers"}
    for command in (parser, operator):
        text = "file to touch after each look, for a liveness probe"
        command.add_argument("--alive-file", type=Path, metavar="FILE", help=text)
    add_config_options(parser, routers | _SCALING)
    add_config_options(operator, routers)


def _bounds(text: str) -> Bounds:
    least, _, most = text.partition(":")
    try:
        return Bounds(int(least), int(most))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be LEAST:MOST, such as 1:4: {error}") from error


async def _run(args: argparse.Namespace) -> int:
    from pdserve.deploy.kubernetes.api import connect, repeat, scale_of
    from pdserve.deploy.kubernetes.lease import LeaderLease
    from pdserve.deploy.kubernetes.scaler import ReplicaScaler, ScalablePool

    bounds = {role: getattr(args, role) for role in _ROLES if getattr(args, role)}
    if not bounds:
        refuse("scaler", "needs --prefill LEAST:MOST, --decode LEAST:MOST, or both")
    targets = {role: f"deployments.v1.apps/pdserve-{role}" for role in bounds}
    for role, _, target in (text.partition("=") for text in args.target):
        if role not in bounds:
            refuse("--target", f"{role!r} is not a role that is scaled: give --{role} too")
        targets[Role(role)] = target
    pools = {role: ScalablePool(*scale_of(targets[role]), bounds[role]) for role in bounds}
    config, clock = config_from(args), time.monotonic
    worker = config.worker
    _log(worker)
    access = dialer(worker.access, "worker.access")
    loads = RouterLoads(Discovery(worker.routers), access, worker.served_names[0])
    async with connect() as client:
        lease = LeaderLease(client, args.lease, clock)
        scaler = ReplicaScaler(client, lease, pools, config.up.scaling, loads.measure, clock)
        await until_stopped(repeat(scaler.look, (ClientError, ConfigError), args.alive_file))
        await _release(lease)
    return 0


async def _operate(args: argparse.Namespace) -> int:
    from pdserve.deploy.kubernetes.api import connect, repeat
    from pdserve.deploy.kubernetes.lease import LeaderLease
    from pdserve.deploy.kubernetes.operator import Operator

    worker, key = config_from(args).worker, os.environ.get(KEY_VARIABLE, "")
    _log(worker)
    access = dialer(worker.access, "worker.access")
    routers = RouterWeights(Discovery(worker.routers), replace(access, token=key or access.token))
    async with connect() as client:
        lease = LeaderLease(client, "pdserve-operator", time.monotonic)
        operator = Operator(client, lease, routers, time.time)
        fatal = (PermissionDenied, Unauthenticated)
        await until_stopped(repeat(operator.look, fatal, args.alive_file))
        await _release(lease)
    return 0


async def _release(lease: LeaderLease) -> None:
    try:
        await lease.release()
    except PdserveError as error:
        logging.getLogger(__name__).warning("the lease was not released: %s", error.message)


def _log(worker: WorkerConfig) -> None:
    log_to_stderr(worker.log.level, worker.log.format)
    logging.getLogger("httpx2").setLevel(logging.WARNING)  # a line for each request
