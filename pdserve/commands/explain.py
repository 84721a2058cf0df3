"""`pdserve explain`: why a request was placed where it was."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pdserve.commands.options import DEFAULT_GRPC, add_dial_options, dialer_from

if TYPE_CHECKING:
    import argparse
    from collections.abc import AsyncIterator

    from pdserve.commands.options import Subparsers
    from pdserve.rpc import Dialer
    from pdserve.v1.admin_pb2 import Explained


def register(commands: Subparsers[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "explain",
        help="show why a request was placed on the workers that it was placed on",
        description="Ask the router for the decisions that it made for a request: the workers as "
        "it saw them, what each scored, why others were passed over, and why the request was "
        "placed again, if it was. The router keeps the last router.decision_log_size decisions. "
        "Exit code 1 where it does not know the request, or does not answer.",
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("request_id", nargs="?", metavar="REQUEST_ID", help="the answer's id")
    which.add_argument("--all", action="store_true", help="every request that is kept")
    parser.add_argument(
        "--grpc",
        default=DEFAULT_GRPC,
        metavar="HOST:PORT",
        help="the router's gRPC address (default: %(default)s)",
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument(
        "--json", action="store_true", help="print JSON Lines, as `pdserve replay-decisions` reads"
    )
    how.add_argument("--save", type=Path, metavar="FILE", help="write the same to a file")
    parser.add_argument(
        "--timeout",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="deadline of the answer (default: %(default)g)",
    )
    add_dial_options(parser)
    parser.set_defaults(handler=_run)


def _run(args: argparse.Namespace) -> int:
    asyncio.run(_explain(args))
    return 0


async def _explain(args: argparse.Namespace) -> None:
    from pdserve.errors import PdserveError

    said = explain(dialer_from(args), args.grpc, args.request_id or "", args.timeout)
    if args.save is not None:
        # What the router says must be taken as it comes, so the file is written at the end.
        lines = [_line(message) async for message in said]
        try:
            await asyncio.to_thread(args.save.write_text, "".join(lines), encoding="utf-8")
        except OSError as error:
            raise PdserveError(f"cannot write {args.save}: {error}") from error
    elif args.json:
        async for message in said:
            sys.stdout.write(_line(message))
    else:
        from pdserve.commands.explain_view import ExplainView

        view = ExplainView()
        async for message in said:
            view.show(message)


async def explain(
    dialer: Dialer, address: str, request_id: str, timeout_s: float
) -> AsyncIterator[Explained]:
    """What the router says of a request, or of all with "". Raises PdserveError."""
    import grpc.aio

    from pdserve.rpc import error_from_rpc
    from pdserve.v1 import admin_pb2, admin_pb2_grpc

    async with dialer.open_channel(address) as channel:
        stub = admin_pb2_grpc.AdminStub(channel)
        asked = admin_pb2.ExplainRequest(request_id=request_id)
        try:
            async for message in stub.Explain(asked, timeout=timeout_s, metadata=dialer.metadata):
                yield message
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from error


def _line(message: Explained) -> str:
    from google.protobuf import json_format

    text = json_format.MessageToJson(message, preserving_proto_field_name=True, indent=None)
    return text + "\n"
