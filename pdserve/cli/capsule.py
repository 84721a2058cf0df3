"""`pdserve capsule`: list and fetch incident capsules."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from pdserve import wire
from pdserve.cli.options import (
    add_command,
    add_seconds,
    add_service_options,
    channel_to,
    say,
    table_of,
)
from pdserve.config import refuse
from pdserve.security.local import write_private
from pdserve.v1 import admin_pb2 as a
from pdserve.v1.admin_pb2_grpc import AdminStub

if TYPE_CHECKING:
    import argparse

    from pdserve.cli.options import Subparsers


def register(commands: Subparsers) -> None:
    parser = add_command(
        commands,
        "capsule",
        _run,
        "fetch what a router knows of one request, for `pdserve replay`",
        "Write the incident capsule of a request to a file: its tokens, workers, placement and "
        "times. Routers keep capsules of failed requests and of answers found wrong; of other "
        "requests one is made if they ended lately. Without a request, list the capsules.",
    )
    parser.add_argument("request_id", metavar="REQUEST_ID", nargs="?", help="id of the answer")
    parser.add_argument(
        "--out", metavar="FILE", type=Path, help="file to write (default: REQUEST_ID.capsule)"
    )
    parser.add_argument("--tenant", default="", help="list those of one tenant")
    parser.add_argument("--model", default="", help="list those of one model")
    add_seconds(parser, "--timeout", 30.0, "timeout of the call")
    add_service_options(parser, as_json="print JSON")


async def _run(args: argparse.Namespace) -> int:
    async with channel_to(args) as (channel, metadata):
        admin = AdminStub(channel)
        if args.request_id is None:
            listed = await admin.ListCapsules(
                a.ListCapsulesRequest(tenant=args.tenant, model=args.model),
                timeout=args.timeout,
                metadata=metadata,
            )
            _show(listed, as_json=args.json)
            return 0
        found = await admin.GetCapsule(
            a.GetCapsuleRequest(request_id=args.request_id),
            timeout=args.timeout,
            metadata=metadata,
        )
    path = args.out or Path(f"{args.request_id.replace('/', '_')}.capsule")
    try:
        write_private(path, found.content)
    except OSError as error:
        refuse("--out", f"cannot write {path}: {error.strerror}")
    if args.json:
        say(json.dumps({**wire.json_object(found.capsule), "file": str(path)}))
    else:
        kept = f"encrypted with key {found.capsule.key}" if found.capsule.key else "not encrypted"
        say(f"{path}: {found.capsule.reason} {found.capsule.code}".rstrip() + f", {kept}")
    return 0


def _show(listed: a.ListCapsulesResponse, *, as_json: bool) -> None:
    from pdserve.cli.console import open_console

    if as_json:
        say(json.dumps(wire.json_object(listed)["capsules"]))
        return
    rows = [
        [
            f"{datetime.fromtimestamp(x.unix_time_s).astimezone():%Y-%m-%d %H:%M:%S}",
            x.request_id,
            x.tenant or None,
            x.model,
            f"{x.reason} {x.code}".rstrip(),
            x.key or None,
            x.size,
        ]
        for x in listed.capsules
    ]
    names = ("ended", "request", "tenant", "model", "reason", "key")
    open_console().print(table_of("", names, ("bytes",), rows))
