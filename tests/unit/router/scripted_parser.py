"""A parser process without vLLM, run by test_parsing.py: the content of an answer is its text in
capitals. Some texts are accidents, each with a file that counts how often it happened.

    python scripted_parser.py DIRECTORY --socket FD --parent-pid PID
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
from pathlib import Path

from pdserve import wire
from pdserve.errors import ParserFailed
from pdserve.v1 import parser_pb2 as p
from workers import parser as real


class ScriptedParser(real.Parsers):
    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def _count(self, text: str) -> int:
        with (self._directory / text).open("a") as file:
            file.write("x")
        return (self._directory / text).stat().st_size

    def handle(self, command: p.ParserCommand):  # type: ignore[no-untyped-def]
        reply = p.ParserReply(stream_id=command.stream_id)
        match command.WhichOneof("command"):
            case "open":
                reply.plan.SetInParent()
                yield reply
            case "input":
                given = command.input
                times = self._count(given.text) if "-" in given.text else 0
                if given.text == "dies-always" or (given.text == "dies-once" and times == 1):
                    os._exit(1)
                if given.text == "hangs-once" and times == 1:
                    signal.pause()
                if given.text == "raises-":
                    failed = ParserFailed("the parser raised ValueError")
                    reply.error.CopyFrom(wire.error_to_pb(failed))
                else:
                    reply.output.index = given.index
                    reply.output.content = given.text.upper()
                    reply.output.reasoning_tokens = 2 if given.finished else 0
                yield reply
                if given.finished:
                    check = p.ParserCheck(index=given.index)
                    yield p.ParserReply(stream_id=command.stream_id, check=check)


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("directory", type=Path)
    arguments.add_argument("--socket", type=int)
    arguments.add_argument("--parent-pid", type=int)
    args = arguments.parse_args()
    if (args.directory / "does-not-start").exists():
        sys.exit(1)
    with socket.socket(fileno=args.socket) as sock:
        real.serve(sock, ScriptedParser(args.directory))


if __name__ == "__main__":
    main()
