"""A grammar gets the tokens after the reasoning, also of an answer that another engine began."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from kv_transfer.vllm.continuation import Continuations
from pdserve.errors import InvalidRequest
from pdserve.types import ReasoningGate
from workers.vllm.patches.reasoning import set_gate

if TYPE_CHECKING:
    from collections.abc import Sequence

END = 9


class Reasoner:
    """Reasoning ends with END."""

    def is_reasoning_end(self, ids: Sequence[int]) -> bool:
        return END in ids

    def is_reasoning_end_streaming(self, _: Sequence[int], delta_ids: Sequence[int]) -> bool:
        return END in delta_ids


class Grammar:
    def __init__(self) -> None:
        self.accepted: list[int] = []

    def accept_tokens(self, _: str, tokens: Sequence[int]) -> bool:
        self.accepted += tokens
        return True


class Request:
    """The part of vLLM's request that continuations use."""

    def __init__(self, *, is_gated: bool) -> None:
        self.request_id = "r"
        self.prompt_token_ids = [1, 2]
        self.all_token_ids = [1, 2]
        self.use_structured_output = True
        self.prefill_stats: Any = None
        self.structured_output_request = SimpleNamespace(
            grammar=Grammar(),
            reasoner=Reasoner() if is_gated else None,
            reasoning_ended=not is_gated,
        )

    @property
    def output_token_ids(self) -> list[int]:
        return self.all_token_ids[2:]

    def append_output_token_ids(self, tokens: list[int]) -> None:
        self.all_token_ids += tokens


@pytest.mark.parametrize(
    ("is_gated", "parts", "accepted"),
    [
        (True, [[3, 4, END, 5, 6]], [5, 6]),
        (True, [[3, 4], [END, 5], [6]], [5, 6]),
        (True, [[3, 4]], []),
        (False, [[3, END], [5]], [3, END, 5]),
    ],
)
def test_a_continued_grammar_starts_after_the_reasoning(
    is_gated: bool, parts: list[list[int]], accepted: list[int]
) -> None:
    continuations, request = Continuations(), Request(is_gated=is_gated)
    for part in parts:
        continuations.append(request, part)  # type: ignore[arg-type]
        continuations.replay_grammar(request)  # type: ignore[arg-type]
    structured = request.structured_output_request
    assert structured.grammar.accepted == accepted
    assert structured.reasoning_ended == (not is_gated or bool(accepted))


def scheduler(tokenizer: object = None) -> Any:
    structured = SimpleNamespace(reasoning_ended=None, reasoner=None)
    manager = SimpleNamespace(tokenizer=tokenizer, reasoner_cls=None)
    requests = {"v": SimpleNamespace(structured_output_request=structured)}
    return SimpleNamespace(requests=requests, structured_output_manager=manager)


def test_a_request_without_a_gate_is_constrained_from_its_first_token() -> None:
    one = scheduler()
    set_gate(one, "v", None)
    assert one.requests["v"].structured_output_request.reasoning_ended is True


def test_a_parser_that_is_unknown_or_does_not_fit_is_refused() -> None:
    for parser in ("nonesuch", "deepseek_r1"):
        tokenizer = SimpleNamespace(get_vocab=dict)
        with pytest.raises(InvalidRequest, match=parser):
            set_gate(scheduler(tokenizer), "v", ReasoningGate(parser, "{}"))
