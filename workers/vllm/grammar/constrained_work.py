"""Work with a constraint, which the engine gets once the guard has accepted that."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from pdserve.errors import InternalError, PdserveError
from workers.engine import StepResult, ended_by

if TYPE_CHECKING:
    from pdserve.types import StructuredOutput
    from workers.engine import StepResults, Work
    from workers.vllm.grammar.guard import GrammarGuard
    from workers.vllm.step.inbox import StepInbox

_log = logging.getLogger(__name__)


class ConstrainedWork:
    """State: the work that waits for the guard, by stream. Owns the guard."""

    def __init__(self, guard: GrammarGuard, inbox: StepInbox, results: StepResults) -> None:
        """Accepted work goes to `inbox`; `results` gets the error of other work."""
        self._guard, self._inbox, self._results = guard, inbox, results
        self._waiting: dict[int, asyncio.Task[None]] = {}

    def submit(self, work: Work, constraint: StructuredOutput, submitted: float) -> None:
        if self._guard.has_accepted(constraint):
            self._add(work, submitted)
        else:
            adding = self._add_after(work, constraint, submitted)
            self._waiting[work.stream_id] = asyncio.get_running_loop().create_task(adding)

    async def _add_after(self, work: Work, constraint: StructuredOutput, submitted: float) -> None:
        try:
            await self._guard.check(constraint)
        except PdserveError as error:
            self._end(work, error)
        except Exception:  # noqa: BLE001 - the stream has to end
            _log.exception("the constraint of request %s", work.request_id)
            self._end(work, InternalError("the worker could not compile the grammar"))
        else:
            self._add(work, submitted)
        finally:
            self._waiting.pop(work.stream_id, None)

    def _add(self, work: Work, submitted: float) -> None:
        if error := self._inbox.add(work, submitted):
            self._end(work, error)

    def _end(self, work: Work, error: PdserveError) -> None:
        self._results.put(StepResult([ended_by(work.stream_id, error)]))

    def cancel(self, stream_id: int) -> None:
        """Forget the work of a stream, if it waits."""
        if (task := self._waiting.pop(stream_id, None)) is not None:
            task.cancel()

    async def close(self) -> None:
        """End all processes. Idempotent."""
        await self._guard.close()
