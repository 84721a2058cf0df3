"""Requests that go on after tokens generated elsewhere, in vLLM's scheduler process. Tried on vLLM
0.32.0.

Such a token becomes an *output* token of the request, as if it had been preempted after sampling
it, so penalties, seeds, minimum and maximum lengths, stop tokens and grammars count it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


class Continuations:
    """State: requests by their vLLM-internal id. Changed only by vLLM's calls, on one thread."""

    def __init__(self) -> None:
        # Output tokens of requests whose first step here is still to come.
        self._resumed: dict[str, list[int]] = {}
        self._replay: dict[str, list[int]] = {}  # tokens a grammar has not been told of yet

    def append(self, request: Request, tokens: Sequence[int]) -> None:
        """Gives the request its next tokens. Runner V2 (GPU) reads them from the request; V1 is
        told through `take_resumed`."""
        request.append_output_token_ids(list(tokens))
        # The scheduler asserts that a first prefill computes no more than the prompt.
        request.prefill_stats = None
        self._resumed[request.request_id] = [int(t) for t in request.output_token_ids]
        if request.structured_output_request is not None:
            self._replay.setdefault(request.request_id, []).extend(tokens)

    def replay_grammar(self, request: Request) -> None:
        """Moves a compiled grammar past the tokens that were generated elsewhere. To be called
        before the request is scheduled, and again until its grammar is there."""
        structured = request.structured_output_request
        if structured is None or request.request_id not in self._replay:
            return
        grammar = structured.grammar
        if grammar is None or isinstance(grammar, Exception):
            return
        tokens = self._replay.pop(request.request_id)
        structured.reasoning_ended = True
        grammar.accept_tokens(request.request_id, tokens)

    def take_resumed(self, output: SchedulerOutput) -> dict[str, list[int]]:
        """Output tokens of those requests that this step schedules first, each once."""
        scheduled = (data.req_id for data in output.scheduled_new_reqs)
        return {r: self._resumed.pop(r) for r in scheduled if r in self._resumed}

    def finished(self, request_id: str) -> None:
        """The request ended; unknown ones are ignored."""
        self._resumed.pop(request_id, None)
        self._replay.pop(request_id, None)
