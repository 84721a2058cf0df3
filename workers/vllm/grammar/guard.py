"""Trial compilation of each constraint in a disposable process before the engine gets it.

Grammar compilers are native code. A constraint can crash them or keep them busy for minutes, which
would end or stall the engine with all its requests. The first constraint therefore starts a
template process with vLLM, the tokenizer and the backends (compiler.py), which is forked for every
new constraint (fork_pool.py, check_fork.py). A constraint that kills its fork is refused.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import signal
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from pdserve import wire
from pdserve.errors import InvalidRequest, Unavailable
from pdserve.process.child_pool import ChildFailed
from workers.vllm.fork_pool import ForkPool

if TYPE_CHECKING:
    from pdserve.types import StructuredOutput
    from workers.vllm.grammar.compiler import GrammarCompiler

logger = logging.getLogger(__name__)

# Limits per constraint. CPU time, not wall time, so that a busy machine refuses nothing.
CPU_S = 4
MEMORY_BYTES = 1 << 30
ACCEPTED = b"\0"
_CHECK_S = 30.0
_MAX_AT_ONCE = 2
_MAX_WAITING = 64
_MAX_VERDICTS = 4096

# Set in the template process and its forks only.
compiler: GrammarCompiler


def preload(config_path: str) -> None:
    """Load everything that forks need. `config_path` has the engine's pickled VllmConfig."""
    global compiler
    # Use no threads: a fork does not inherit its parent's threads.
    os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
    from workers.vllm.grammar.compiler import GrammarCompiler

    compiler = GrammarCompiler(pickle.loads(Path(config_path).read_bytes()))


class GrammarGuard:
    """Checks constraints. State: the forks; by digest of a constraint the reason to refuse it (""
    if accepted), and the running check."""

    def __init__(self, config: bytes) -> None:
        """`config` is the engine's pickled VllmConfig."""
        self._forks = ForkPool(
            f"{__name__}:preload",
            "workers.vllm.grammar.check_fork",
            config,
            at_once=_MAX_AT_ONCE,
            timeout_s=_CHECK_S,
            task="compile grammars",
        )
        self._verdicts: dict[bytes, str] = {}
        self._checks: dict[bytes, asyncio.Task[str]] = {}

    def has_accepted(self, constraint: StructuredOutput) -> bool:
        return self._verdicts.get(sha256(_encoded(constraint)).digest()) == ""

    async def check(self, constraint: StructuredOutput) -> None:
        """Raise InvalidRequest if `constraint` is refused, and Unavailable if the check does not
        finish in time."""
        data = _encoded(constraint)
        digest = sha256(data).digest()
        reason = self._verdicts.get(digest)
        if reason is None:
            if (task := self._checks.get(digest)) is None:
                if len(self._checks) >= _MAX_WAITING:
                    text = f"{_MAX_WAITING} grammars wait to be compiled on this worker"
                    raise Unavailable(text, retry_after_s=1.0)
                task = self._checks[digest] = asyncio.create_task(self._check(digest, data))
            reason = await asyncio.shield(task)  # other requests may wait for the same check
        if reason:
            raise InvalidRequest(f"structured_output: {reason}", field="structured_output")

    async def _check(self, digest: bytes, data: bytes) -> str:
        try:
            reason = await self._in_fork(data)
        finally:
            del self._checks[digest]
        while len(self._verdicts) >= _MAX_VERDICTS:
            del self._verdicts[next(iter(self._verdicts))]
        self._verdicts[digest] = reason
        return reason

    async def _in_fork(self, data: bytes) -> str:
        try:
            answer = await self._forks.run(data)
        except ChildFailed as error:
            logger.warning("a constraint ended its compiler process with exit code %d", error.code)
            if error.code == -signal.SIGXCPU:
                return f"takes over {CPU_S} s of CPU time to compile"
            gib = MEMORY_BYTES >> 30  # most allocators abort when memory runs out
            return f"crashes the compiler of grammars, or takes over {gib} GiB of memory to compile"
        return "" if answer == ACCEPTED else answer.decode()

    async def close(self) -> None:
        """End all processes. Idempotent."""
        for task in list(self._checks.values()):
            task.cancel()
        self._forks.close()  # first, because a check that waits for its fork ends with the template
        await asyncio.gather(*self._checks.values(), return_exceptions=True)


def _encoded(constraint: StructuredOutput) -> bytes:
    return wire.structured_to_pb(constraint).SerializeToString(deterministic=True)
