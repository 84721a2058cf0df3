"""`pdserve scaler`: as many workers on Kubernetes as the load asks for."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import signal
import time
from typing import TYPE_CHECKING

from pdserve.cli.options import add_command, add_config_options, config_from, log_to_stderr
from pdserve.config import refuse
from pdserve.deploy.load import RouterLoads
from pdserve.deploy.scaling import Bounds, ScalingRules
from pdserve.discovery import Discovery
from pdserve.security.tls import dialer
from pdserve.types import Role

if TYPE_CHECKING:
    from pdserve.cli.options import Subparsers
    from pdserve.deploy.kubernetes.scaler import Pool

_ROLES = (Role.PREFILL, Role.DECODE)
_DEFAULTS = ScalingRules()


def register(commands: Subparsers) -> None:
    parser = add_command(
        *(commands, "scaler", _run, "set how many workers there are on Kubernetes, by load"),
        "Ask the routers of worker.routers for the load of the model that worker.model and "
        "worker.model_names name, and set the replicas of its pools. Of several such processes one "
        "leads, by a Lease. Nobody else may set the replicas.",
    )
    text = "the cluster of this pod, or that of KUBECONFIG"
    parser.add_argument("--on", choices=("kubernetes",), required=True, help=text)
    for role in _ROLES:
        text = f"fewest and most {role} workers"
        parser.add_argument(f"--{role}", type=_bounds, metavar="LEAST:MOST", help=text)
    parser.add_argument(
        "--target",
        action="append",
        default=[],
        metavar="ROLE=TYPE.VERSION.GROUP/NAME",
        help="what has a role's replicas (default: deployments.v1.apps/pdserve-ROLE); repeatable",
    )
    for flag, value, metavar, text in (
        ("--target-load", _DEFAULTS.target_load, "SHARE", "load of a role with enough workers"),
        ("--up-after", _DEFAULTS.up_after_s, "SECONDS", "of load before there are more workers"),
        ("--down-after", _DEFAULTS.down_after_s, "SECONDS", "without it before there is one less"),
    ):
        note = f"{text} (default: {value:g})"
        parser.add_argument(flag, type=float, default=value, metavar=metavar, help=note)
    text = "name of the Lease (default: %(default)s)"
    parser.add_argument("--lease", default="pdserve-scaler", metavar="NAME", help=text)
    add_config_options(parser, {"--router": "worker.routers"})


def _bounds(text: str) -> Bounds:
    least, _, most = text.partition(":")
    try:
        return Bounds(int(least), int(most))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be LEAST:MOST, such as 1:4: {error}") from error


async def _run(args: argparse.Namespace) -> int:
    from pdserve.deploy.kubernetes.api import Kubernetes
    from pdserve.deploy.kubernetes.lease import LeaderLease
    from pdserve.deploy.kubernetes.scaler import ReplicaScaler

    try:
        rules = ScalingRules(
            target_load=args.target_load, up_after_s=args.up_after, down_after_s=args.down_after
        )
    except ValueError as error:
        refuse("scaler", str(error))
    pools, worker = _pools(args), config_from(args).worker
    log_to_stderr(worker.log_level)
    logging.getLogger("httpx2").setLevel(logging.WARNING)  # a line for each request
    loads = RouterLoads(
        Discovery(worker.routers),
        dialer(worker.access, "worker.access"),
        worker.served_names[0],
    )
    api = Kubernetes()
    lease = LeaderLease(api, args.lease, time.monotonic)
    scaler = ReplicaScaler(api, lease, pools, rules, loads.measure, time.monotonic)
    running = asyncio.ensure_future(scaler.run())
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, running.cancel)
    try:
        with contextlib.suppress(asyncio.CancelledError):
            await running
    finally:
        await api.close()
    return 0


def _pools(args: argparse.Namespace) -> dict[Role, Pool]:
    """Return what the options say of each role. Raises ConfigError."""
    from pdserve.deploy.kubernetes.api import Target
    from pdserve.deploy.kubernetes.scaler import Pool

    bounds = {role: getattr(args, role.value) for role in _ROLES if getattr(args, role.value)}
    targets = {role: f"deployments.v1.apps/pdserve-{role}" for role in bounds}
    for text in args.target:
        name, _, target = text.partition("=")
        if name not in bounds:
            refuse("--target", f"{name!r} must be a role whose workers are given, by --{name}")
        targets[Role(name)] = target
    if not bounds:
        refuse("scaler", "needs --prefill LEAST:MOST, --decode LEAST:MOST, or both")
    return {role: Pool(Target.parse(targets[role]), bounds[role]) for role in bounds}
