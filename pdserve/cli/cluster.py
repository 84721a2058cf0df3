"""`pdserve scale`, `upgrade` and `down`, and the part of `up` and `status` for `--on ray`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from pdserve.cli import flags
from pdserve.cli.options import add_command, add_config_options, config_from, say, table_of
from pdserve.config import refuse

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

    from pdserve.cli.options import Subparsers


def register(commands: Subparsers) -> None:
    scale = add_command(
        commands,
        "scale",
        _scale,
        "change the number of workers of a service on a cluster",
        "Change the number of workers per role: `pdserve scale --on ray decode=4`. New workers are "
        "started, removed ones drained; no request is lost. With several models, add the model's "
        "name to the role: decode-NAME=4. Returns at once.",
    )
    scale.add_argument("counts", nargs="+", metavar="ROLE=N", help="workers of a role")
    down = add_command(commands, "down", _down, "drain and end a service on a cluster")
    for parser in (scale, down):
        add_on_option(parser, required=True)


def add_on_option(parser: argparse.ArgumentParser, *, required: bool = False) -> None:
    text = "the Ray cluster at RAY_ADDRESS, or this machine's"
    parser.add_argument("--on", choices=("ray",), required=required, help=text)


def add_up_options(parser: argparse.ArgumentParser) -> None:
    add_on_option(parser)
    group = parser.add_argument_group("with --on ray")
    _add_worker_options(group, "(default: %s)")
    group.add_argument(
        "--allow-fragile-head",
        action="store_true",
        help="also on a cluster that ends with its head",
    )


def register_upgrade(commands: Subparsers) -> None:
    upgrade = add_command(
        commands,
        "upgrade",
        _upgrade,
        "change configuration or model of a service on a cluster",
        "Change the configuration of a service on a cluster without losing a request. Workers that "
        "differ are replaced one at a time in each role: the new one serves before the old one "
        "drains. Routers are replaced one after the other, at their addresses. Returns when all is "
        "done; if a new process does not start, the old ones stay, and the upgrade is undone. The "
        "numbers of workers do not change: see `pdserve scale`.",
    )
    add_config_options(upgrade, flags.UPGRADE)
    add_on_option(upgrade, required=True)
    _add_worker_options(upgrade, "(default: as now)")


def _add_worker_options(parser: argparse._ActionsContainer, default: str) -> None:
    def add(flag: str, text: str, value: object, **options: Any) -> None:
        note = default.replace("%s", str(value))
        parser.add_argument(flag, help=f"{text} {note}", **options)

    add("--cpus-per-worker", "CPUs for each worker", 1, type=float, metavar="N")
    add("--gpus-per-worker", "GPUs for each worker", 0, type=int, metavar="N")
    text = "pack workers on few nodes, or spread them over many"
    add("--strategy", text, "spread", choices=("pack", "spread"))


def up(args: argparse.Namespace) -> int:
    from pdserve.deploy.ray import service
    from pdserve.deploy.ray.spec import service_spec

    config = config_from(args)
    cpus = 1.0 if args.cpus_per_worker is None else args.cpus_per_worker
    spec = service_spec(
        config, cpus=cpus, gpus=args.gpus_per_worker or 0, strategy=args.strategy or "spread"
    )
    with service.joined():
        service.start(spec, allow_fragile_head=args.allow_fragile_head)
        found = service.until_ready(config.up.start_timeout_s)
        service.announce(found)
        _say_routers(found)
    return 0


def _upgrade(args: argparse.Namespace) -> int:
    from pdserve.deploy.ray import service
    from pdserve.deploy.ray.spec import service_spec

    config = config_from(args)
    with service.joined():
        now = service.spec()
        cpus = now.cpus if args.cpus_per_worker is None else args.cpus_per_worker
        gpus = now.gpus if args.gpus_per_worker is None else args.gpus_per_worker
        strategy = args.strategy or now.strategy
        to = service_spec(config, cpus=cpus, gpus=gpus, strategy=strategy)
        found = service.upgrade(to)
        service.announce(found)
        _say_routers(found)
    return 0


def _say_routers(found: Mapping[str, Any]) -> None:
    for name, state in found["processes"].items():
        if "http" in state:
            say(f"{name}: HTTP at {state['http']}, gRPC at {state['grpc']}")


def show_status(args: argparse.Namespace) -> int:
    from pdserve.cli.console import open_console
    from pdserve.deploy.ray import service

    with service.joined():
        found = service.status()
    if args.json:
        say(json.dumps(found, indent=2))
        return 0
    rows = [
        (name, x["node"], x.get("pid"), x.get("lives"), x.get("failure") or x["doing"])
        for name, x in found["processes"].items()
    ]
    title, caption = "processes on Ray", found["failure"]
    if found["upgrading"]:
        title += ", upgrade under way"
    if found["at_zero"]:
        caption += f"\nno worker until it is asked for: {', '.join(found['at_zero'])}"
    if found["refused"]:
        caption = f"the last upgrade was undone: {found['refused']}\n{caption}"
    caption = caption.strip()
    console = open_console()
    console.print(
        table_of(
            title, ("process", "node"), ("pid", "starts"), rows, notes="doing", caption=caption
        )
    )
    return 0


def _scale(args: argparse.Namespace) -> int:
    counts = {}
    for text in args.counts:
        role, _, count = text.partition("=")
        if not count.isdecimal():
            refuse("scale", f"must be ROLE=N, such as decode=4, not {text!r}")
        counts[role] = int(count)
    from pdserve.deploy.ray import service

    with service.joined():
        service.scale(counts)
    return 0


def _down(args: argparse.Namespace) -> int:
    from pdserve.deploy.ray import service

    with service.joined():
        service.down()
    return 0
