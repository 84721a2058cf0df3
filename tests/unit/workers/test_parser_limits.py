"""Limits on what one answer may take of the parser process, with parsers that burn CPU time."""

from __future__ import annotations

import re
import socket
import threading
from typing import TYPE_CHECKING, Any

from pdserve.net import framing
from pdserve.v1 import parser_pb2 as p
from workers import parser

if TYPE_CHECKING:
    from collections.abc import Callable

# Backtracks for longer than anybody waits.
REDOS = re.compile(r"(a+)+b")


class Slow:
    """Stands for RequestParsers in the parser process: the work is `do`."""

    def __init__(self, do: Callable[[], object]) -> None:
        self._do = do

    def parse(self, given: p.ParserInput) -> p.ParserOutput:
        try:
            if given.text == "slow":
                self._do()
        except Exception:  # noqa: BLE001 - as vLLM's parsers do
            return p.ParserOutput()
        return p.ParserOutput(content=given.text)


def replies(parsers: parser.Parsers, *commands: p.ParserCommand) -> list[Any]:
    """Have `parsers` serve `commands` on this thread, as the process does on its main thread."""
    ours, theirs = socket.socketpair()
    found: list[Any] = []

    def talk() -> None:
        for command in commands:
            ours.sendall(framing.pack(command))
        ours.shutdown(socket.SHUT_WR)
        frames = framing.FrameParser(p.ParserReply)
        while data := ours.recv(1 << 16):
            found.extend(frames.feed(data))

    with ours, theirs:
        router = threading.Thread(target=talk)
        router.start()
        parser.serve(theirs, parsers)
        theirs.shutdown(socket.SHUT_WR)
        router.join()
    return [x.error.code or x.output.content for x in found[1:]]


def given(stream_id: int, text: str) -> p.ParserCommand:
    return p.ParserCommand(stream_id=stream_id, input=p.ParserInput(text=text, token_ids=[1]))


def parsers_of(do: Callable[[], object], **limits: float) -> parser.Parsers:
    parsers = parser.Parsers(parser.ParserLimits(**limits))
    for stream_id in (1, 2):
        made: Any = Slow(do)
        parsers._open[stream_id] = parser._OpenAnswer(made, parsers._limits.answer_s)
    return parsers


def test_a_delta_that_takes_too_long_fails_its_answer_and_no_other() -> None:
    parsers = parsers_of(lambda: REDOS.match("a" * 64), delta_s=0.05)
    commands = [given(2, "x"), given(1, "slow"), given(1, "more"), given(2, "y")]
    assert replies(parsers, *commands) == ["x", "answer_not_parsed", "answer_not_parsed", "y"]


def test_an_answer_of_slow_deltas_uses_up_its_budget() -> None:
    work = range(2_000_000)  # some 20 ms
    parsers = parsers_of(lambda: sum(work), token_s=0.0, answer_s=0.1)
    found = replies(parsers, *[given(1, "slow")] * 50, given(2, "x"))
    assert found[0] == "slow"
    assert found[-2:] == ["answer_not_parsed", "x"]
