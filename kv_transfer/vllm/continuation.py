"""Requests that continue after tokens generated elsewhere. Tried on vLLM 0.32.0 and 0.33.0 (CPU).

Such a token becomes an *output* token of the request, as if the request had been preempted after
sampling it. Penalties, seeds, length limits, stop tokens and grammars therefore count it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.structured_output import StructuredOutputManager

if TYPE_CHECKING:
    from collections.abc import MutableMapping, Sequence

    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


class _Gate(StructuredOutputManager):  # type: ignore[misc]
    """vLLM's rule for the tokens that a grammar gets: those after the reasoning, if the request has
    a parser of reasoning. State: none."""

    def __init__(self) -> None:
        self.enable_in_reasoning = False

    def _get_reasoner(self, request: Request) -> Any:
        structured = request.structured_output_request
        return None if structured is None else structured.reasoner


_GATE = _Gate()


class Continuations:
    """Continued requests in vLLM's scheduler process, by vLLM's internal request id."""

    def __init__(self) -> None:
        # Output tokens of requests whose first step here is still to come.
        self._resumed: dict[str, list[int]] = {}
        self._replay: dict[str, list[int]] = {}  # tokens that a grammar has not accepted yet

    def append(self, request: Request, tokens: Sequence[int]) -> None:
        """Give the request its next tokens. Runner V2 (GPU) reads them from the request; runner V1
        is told through `take_resumed`."""
        request.append_output_token_ids(list(tokens))
        # The scheduler asserts that a first prefill computes no more than the prompt.
        request.prefill_stats = None
        self._resumed[request.request_id] = [int(t) for t in request.output_token_ids]
        if request.structured_output_request is not None:
            self._replay.setdefault(request.request_id, []).extend(tokens)

    def replay_grammar(self, request: Request) -> None:
        """Advance a compiled grammar past the tokens that were generated elsewhere.

        Call it before the request is scheduled, again until its grammar is compiled.
        """
        structured = request.structured_output_request
        if structured is None or request.request_id not in self._replay:
            return
        grammar = structured.grammar
        if grammar is None or isinstance(grammar, Exception):
            return
        _GATE.accept_tokens(request, self._replay.pop(request.request_id))

    def take_resumed(self, output: SchedulerOutput) -> dict[str, list[int]]:
        """Return the output tokens of requests that this step schedules first, each once."""
        scheduled = (data.req_id for data in output.scheduled_new_reqs)
        return {r: self._resumed.pop(r) for r in scheduled if r in self._resumed}

    def finished(self, request_id: str) -> None:
        self._resumed.pop(request_id, None)
        self._replay.pop(request_id, None)


class SeededGenerator(torch.Generator):
    """CPU generator whose state follows from its seed and the number of tokens drawn.

    After a partial prefill chunk, runner V1 takes back the random number that it drew too many:
    `generator.set_offset(generator.get_offset() - 4)`. A CPU generator has no offset and raises,
    which ends the engine. The CPU sampler draws one number a sampled token
    (v1/sample/ops/topk_topp_sampler.py), so the state can be computed again.
    """

    def bind(self, seed: int, tokens: list[int]) -> SeededGenerator:
        """Follow `tokens`, the request's live list of output tokens."""
        self._seed = seed
        self._tokens = tokens
        self.set_offset(0)
        return self

    def get_offset(self) -> int:
        return 4  # the runner subtracts 4

    def set_offset(self, offset: int) -> torch.Generator:
        self.manual_seed(self._seed)
        if self._tokens:
            torch.randint(0, 2**31, (len(self._tokens),), generator=self, dtype=torch.long)
        return self


class _StateFactory:
    """Replacement for `CachedRequestState` that adds tokens generated elsewhere."""

    def __init__(self, original: Any, resumed: MutableMapping[str, list[int]]) -> None:
        self.original = original
        self.resumed = resumed

    def __call__(self, **values: Any) -> Any:
        tokens = self.resumed.pop(values["req_id"], None)
        if tokens:
            values["output_token_ids"] = list(tokens)
        generator = values.get("generator")
        if generator is not None and generator.device.type == "cpu":
            values["generator"] = SeededGenerator().bind(
                values["sampling_params"].seed, values["output_token_ids"]
            )
        return self.original(**values)


def patch_runner_v1(resumed: MutableMapping[str, list[int]] | None = None) -> None:
    """Make vLLM's model runner V1 (CPU) start continued requests with their output tokens.

    `resumed` maps request ids to those tokens; the runner takes them out. Idempotent.
    """
    from vllm.v1.worker import gpu_model_runner as runner

    current: Any = runner.CachedRequestState
    if isinstance(current, _StateFactory):
        if resumed is not None:
            current.resumed = resumed
        return
    factory: Any = _StateFactory(current, {} if resumed is None else resumed)
    runner.CachedRequestState = factory
