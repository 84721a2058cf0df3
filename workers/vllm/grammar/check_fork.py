"""A disposable process that compiles one constraint: see guard.py.

It is forked from a process that ran `guard.preload`. It replies to a StructuredOutput with ACCEPTED
or the reason of the refusal.
"""

from __future__ import annotations

import logging
from argparse import ArgumentParser

from pdserve import wire
from pdserve.process.child_pool import calls, connected, limit, reply
from pdserve.v1 import common_pb2 as c
from workers.vllm.fork_pool import STACK_BYTES
from workers.vllm.grammar import guard
from workers.vllm.grammar.guard import ACCEPTED, CPU_S, MEMORY_BYTES

_MAX_REASON = 1000  # it may repeat the constraint


def main() -> None:
    logging.disable()  # the client gets vLLM's message about an invalid grammar
    _, sock = connected(ArgumentParser())
    constraint = wire.structured_from_pb(c.StructuredOutput.FromString(next(calls(sock))))
    limit(MEMORY_BYTES, CPU_S, STACK_BYTES)
    try:
        reason = guard.compiler.refusal(constraint)[:_MAX_REASON].encode()
    except MemoryError:
        reason = b"takes too much memory to compile"
    reply(sock, reason or ACCEPTED)


main()
