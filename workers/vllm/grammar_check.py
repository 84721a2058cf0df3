"""A disposable process that compiles one constraint: see grammar_guard.py.

    python -m workers.vllm.grammar_check FD

It is forked from a process that ran `grammar_guard.preload`. It reads a StructuredOutput from the
socket FD and sends ACCEPTED or the reason of the refusal.
"""

from __future__ import annotations

import logging
import socket
import sys

from pdserve import wire
from pdserve.process.child import die_with
from pdserve.v1 import common_pb2 as c
from workers.vllm import grammar_guard
from workers.vllm.fork_pool import limit, send
from workers.vllm.grammar_guard import ACCEPTED, CPU_S, MEMORY_BYTES

_MAX_REASON = 1000  # it may repeat the constraint


def main() -> None:
    die_with(0)
    logging.disable()  # the client gets vLLM's message on an invalid grammar
    with socket.socket(fileno=int(sys.argv[1])) as sock, sock.makefile("rb") as file:
        constraint = wire.structured_from_pb(c.StructuredOutput.FromString(file.read()))
        limit(MEMORY_BYTES, CPU_S)
        try:
            reason = grammar_guard.compiler.refusal(constraint)[:_MAX_REASON].encode()
        except MemoryError:
            reason = b"takes too much memory to compile"
        send(sock, reason or ACCEPTED)


main()
