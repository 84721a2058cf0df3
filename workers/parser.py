"""The parser process of a router: finds tool calls and reasoning in answers.

vLLM's parsers import torch, and some take milliseconds a token, so they run beside the router and
not in it. One thread handles one command after the other, and answers each before it reads the
next: if the process dies or hangs, it was on the oldest command without an answer.

    python -m workers.parser --socket FD --parent-pid PID
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import logging
import os
import socket
import sys
from typing import TYPE_CHECKING

from pdserve import framing, wire
from pdserve.errors import ParserFailed, PdserveError
from pdserve.local.child import die_with, exit_at_once
from pdserve.v1 import parser_pb2 as p

if TYPE_CHECKING:
    from collections.abc import Iterator

    from workers.vllm.parsing import ParsedRequest

_READ_BYTES = 1 << 18
_ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",  # tokenizers are directories
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
}

logger = logging.getLogger(__name__)


class Parsers:
    """State: the open requests by their stream."""

    def __init__(self) -> None:
        self._open: dict[int, ParsedRequest] = {}

    def handle(self, command: p.ParserCommand) -> Iterator[p.ParserReply]:
        """Yield the answers to `command`."""
        from workers.vllm.parsing import ParsedRequest

        stream_id = command.stream_id
        match command.WhichOneof("command"):
            case "open":
                with _errors_in(reply := p.ParserReply(stream_id=stream_id)):
                    opened = self._open[stream_id] = ParsedRequest(command.open)
                    reply.plan.CopyFrom(opened.plan)
                yield reply
            case "input":
                given = command.input
                with _errors_in(reply := p.ParserReply(stream_id=stream_id)):
                    reply.output.CopyFrom(self._open[stream_id].parse(given))
                yield reply
                if given.finished:
                    with _errors_in(reply := p.ParserReply(stream_id=stream_id)):
                        reply.check.CopyFrom(self._open[stream_id].check(given))
                    yield reply
            case "close":
                self._open.pop(stream_id, None)


@contextlib.contextmanager
def _errors_in(reply: p.ParserReply) -> Iterator[None]:
    """Turn an error into the reply."""
    try:
        yield
    except PdserveError as error:
        reply.error.CopyFrom(wire.error_to_pb(error))
    except Exception as error:
        logger.exception("parser")
        failed = ParserFailed(f"the parser raised {type(error).__name__}")
        reply.error.CopyFrom(wire.error_to_pb(failed))


def serve(sock: socket.socket, parsers: Parsers) -> None:
    """Serve a router until it closes the connection."""
    frames = framing.FrameParser(p.ParserCommand)
    sock.sendall(framing.pack(p.ParserReply()))
    while data := sock.recv(_READ_BYTES):
        for command in frames.feed(data):
            for reply in parsers.handle(command):
                sock.sendall(framing.pack(reply))


def main() -> None:
    arguments = argparse.ArgumentParser(prog="workers.parser")
    arguments.add_argument("--socket", type=int, required=True)
    arguments.add_argument("--parent-pid", type=int, required=True)
    args = arguments.parse_args()
    die_with(args.parent_pid)
    logging.basicConfig(
        stream=sys.stderr, level="INFO", format="%(levelname)s %(name)s: %(message)s"
    )
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # A client waits for this. Collections take a fifth of the time, and free nothing.
    gc.disable()
    import workers.vllm.parsing  # noqa: F401 - takes seconds, and may fail

    gc.freeze()
    gc.enable()

    router_has_ended = (ConnectionError, KeyboardInterrupt)
    with socket.socket(fileno=args.socket) as sock, contextlib.suppress(*router_has_ended):
        serve(sock, Parsers())
    exit_at_once(0)


if __name__ == "__main__":
    main()
