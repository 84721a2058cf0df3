"""`pdserve scale` and `down`, and what `up` and `status` do with `--on ray`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from pdserve.cli.options import add_command, config_from, say, table_of
from pdserve.config import refuse

if TYPE_CHECKING:
    import argparse

    from pdserve.cli.options import Subparsers


def register(commands: Subparsers) -> None:
    scale = add_command(
        *(commands, "scale", _scale, "change how many workers a service on a cluster has"),
        "Change how many workers roles have: `pdserve scale --on ray decode=4`. New workers are "
        "started; those that go are drained, and no request is lost. Returns at once.",
    )
    scale.add_argument("counts", nargs="+", metavar="ROLE=N", help="workers of a role")
    down = add_command(*(commands, "down", _down, "drain and end a service on a cluster"))
    for parser in (scale, down):
        add_on_option(parser, required=True)


def add_on_option(parser: argparse.ArgumentParser, *, required: bool = False) -> None:
    text = "the Ray cluster at RAY_ADDRESS, or that of this machine"
    parser.add_argument("--on", choices=("ray",), required=required, help=text)


def add_up_options(parser: argparse.ArgumentParser) -> None:
    add_on_option(parser)
    group = parser.add_argument_group("with --on ray")
    group.add_argument("--cpus-per-worker", type=float, default=1.0, metavar="N")
    group.add_argument("--gpus-per-worker", type=int, default=0, metavar="N")
    group.add_argument(
        "--allow-fragile-head",
        action="store_true",
        help="also on a cluster that ends when its head does",
    )


def up(args: argparse.Namespace) -> int:
    from pdserve.deploy.ray import service
    from pdserve.deploy.ray.spec import service_spec

    config = config_from(args)
    spec = service_spec(config, cpus=args.cpus_per_worker, gpus=args.gpus_per_worker)
    with service.joined():
        service.start(spec, allow_fragile_head=args.allow_fragile_head)
        found = service.until_ready(config.up.start_timeout_s)
    for name in spec.routers:
        state = found["processes"][name]
        say(f"{name}: HTTP at {state['http']}, gRPC at {state['grpc']}")
    return 0


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
