"""Requests that continue after tokens generated elsewhere. Tested with vLLM 0.32.0, 0.33.0 (CPU).

Such a token becomes an *output* token of the request, as if the request had been preempted after
sampling it. Penalties, seeds, length limits, stop tokens and grammars therefore count it.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.structured_output import StructuredOutputManager

if TYPE_CHECKING:
    from collections.abc import MutableMapping, Sequence

    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


logger = logging.getLogger(__name__)


class _GrammarGate(StructuredOutputManager):  # type: ignore[misc]
    """vLLM's rule for the tokens that a grammar must accept: only tokens after the reasoning, if
    the request has a reasoning parser. Has no state; skips vLLM's constructor, which loads
    backends."""

    def __init__(self) -> None:
        self.enable_in_reasoning = False

    def _get_reasoner(self, request: Request) -> Any:
        structured = request.structured_output_request
        return None if structured is None else structured.reasoner


_GATE = _GrammarGate()


class Continuations:
    """Continued requests in vLLM's scheduler process, by vLLM's internal request id."""

    def __init__(self) -> None:
        # Output tokens of requests that were not scheduled here yet.
        self._resumed: dict[str, list[int]] = {}
        self._replay: dict[str, list[int]] = {}  # tokens for grammars that are still being compiled

    def append(self, request: Request, tokens: Sequence[int]) -> None:
        """Append tokens to the request's output. Runner V2 (GPU) reads them from the request;
        runner V1 receives them through `take_resumed`."""
        request.append_output_token_ids(list(tokens))
        # vLLM's scheduler asserts with these statistics that a first prefill computes no more than
        # the prompt. This one also computes the appended tokens.
        request.prefill_stats = None
        self._resumed[request.request_id] = [int(t) for t in request.output_token_ids]
        if request.structured_output_request is not None:
            self._replay.setdefault(request.request_id, []).extend(tokens)

    def replay_grammar(self, request: Request) -> None:
        """Advance a compiled grammar past the tokens that were generated elsewhere.

        Does nothing until the grammar is compiled: call it each time before the request may be
        scheduled.
        """
        structured = request.structured_output_request
        if structured is None or request.request_id not in self._replay:
            return
        grammar = structured.grammar
        if grammar is None or isinstance(grammar, Exception):
            return
        _GATE.accept_tokens(request, self._replay.pop(request.request_id))

    def take_resumed(self, output: SchedulerOutput) -> dict[str, list[int]]:
        """Return the output tokens of requests that this step schedules for the first time."""
        scheduled = (data.req_id for data in output.scheduled_new_reqs)
        return {r: self._resumed.pop(r) for r in scheduled if r in self._resumed}

    def finished(self, request_id: str) -> None:
        self._resumed.pop(request_id, None)
        self._replay.pop(request_id, None)


def resume_in(_worker: Any, resumed: MutableMapping[str, list[int]]) -> None:
    """Give runner V1 of this process the output tokens of requests that the next step starts."""
    patch_runner_v1(resumed)


class ContinuationsWithoutConnector(Continuations):
    """Continued requests of an engine without a KV connector. It replaces `schedule` on the
    scheduler instance: a connector would learn of a started request there, and its metadata would
    carry the tokens to all processes that run the model."""

    def __init__(self, scheduler: Any, executor: Any) -> None:
        super().__init__()
        executor.collective_rpc(resume_in, args=({},))  # installs the patch, in each process
        schedule = scheduler.schedule

        def resuming_schedule(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            for started in output.scheduled_new_reqs:
                # Its grammar is compiled, and vLLM queries it for the next token only after this.
                self.replay_grammar(scheduler.requests[started.req_id])
            if resumed := self.take_resumed(output):
                executor.collective_rpc(resume_in, args=(resumed,))
            return output

        scheduler.schedule = resuming_schedule


class SeededGenerator(torch.Generator):
    """CPU generator whose state follows from its seed and the number of tokens drawn.

    After a partial prefill chunk, runner V1 takes back the one random number too many:
    `generator.set_offset(generator.get_offset() - 4)`. A CPU generator has no offset and raises,
    which ends the engine. The CPU sampler draws one number per sampled token
    (v1/sample/ops/topk_topp_sampler.py), so the state can be recomputed.
    """

    def bind(self, seed: int, tokens: list[int]) -> SeededGenerator:
        """Derive the state from `tokens`, the request's live list of output tokens."""
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
        if generator is not None and generator.device.type != "cpu":
            if tokens:
                # On a GPU, the kernels determine how far a token advances the generator.
                logger.warning(
                    "request %s has a seed and continues here on vLLM's model runner V1: its next"
                    " tokens may differ from those of one engine",
                    values["req_id"],
                )
        elif generator is not None:
            values["generator"] = SeededGenerator().bind(
                values["sampling_params"].seed, values["output_token_ids"]
            )
        return self.original(**values)


def patch_runner_v1(resumed: MutableMapping[str, list[int]] | None = None) -> None:
    """Make vLLM's model runner V1 (CPU) start continued requests with their output tokens.

    `resumed` maps request ids to those tokens; the runner removes each entry it uses. Idempotent.
    """
    from vllm.v1.worker import gpu_model_runner as runner

    current: Any = runner.CachedRequestState
    if isinstance(current, _StateFactory):
        if resumed is not None:
            current.resumed = resumed
        return
    factory: Any = _StateFactory(current, {} if resumed is None else resumed)
    runner.CachedRequestState = factory
