"""A parser process without vLLM, run by test_parsing.py. The content of an answer is its text in
capitals. Some texts cause faults; a file for each fault counts its occurrences.

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
from pdserve.errors import AnswerNotParsed
from pdserve.v1 import parser_pb2 as p
from workers import parser as real


class ScriptedParser(real.Parsers):
    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def _count(self, text: str) -> int:
        with (self._directory / text).open("a") as file:
            file.write("x")
        return (self._directory / text).stat().st_size

    def handle(self, command: p.ParserCommand) -> p.ParserReply | None:
        reply = p.ParserReply(stream_id=command.stream_id)
        match command.WhichOneof("command"):
            case "open":
                reply.plan.SetInParent()
            case "input":
                given = command.input
                times = self._count(given.text) if "-" in given.text else 0
                if given.text == "dies-always" or (given.text == "dies-once" and times == 1):
                    os._exit(1)
                if given.text == "hangs-":
                    signal.pause()
                if given.text == "raises-":
                    failed = AnswerNotParsed("the parser raised ValueError")
                    reply.error.CopyFrom(wire.error_to_pb(failed))
                else:
                    reply.output.index = given.index
                    reply.output.content = given.text.upper()
                    reply.output.reasoning_tokens = 2 if given.finished else 0
            case _:
                return None
        return reply


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
