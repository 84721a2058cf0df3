"""What is asked while faults happen: a trace's requests, each with one of the features that an
answer must keep through any fault."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import TYPE_CHECKING, Final, Literal

from benchmarks.prompts import PromptMaker, ordinary_tokens
from benchmarks.trace import load_trace
from benchmarks.workload import Shape, shape_workload
from pdserve.types import Constraint, SamplingParams, StructuredOutput

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchmarks.trace import Trace, TraceRequest

Face = Literal["grpc", "http", "sse"]
TRACE: Final = "chat"
SCHEMA: Final = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'
_SHAPE: Final = Shape(scale_lengths=Fraction(1, 2), max_output_tokens=96, max_total_tokens=1500)
_LEAST_OUTPUT: Final = 24


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. ``number`` tells it apart; ``kind`` is its feature."""

    number: int
    kind: str
    face: Face
    prompt: tuple[int, ...]
    sampling: SamplingParams


def _structured() -> StructuredOutput:
    return StructuredOutput(Constraint.JSON_SCHEMA, SCHEMA)


# kind: face and sampling parameters; every one has a seed of its own beside.
KINDS: Final[Mapping[str, tuple[Face, Mapping[str, object]]]] = {
    "greedy": ("grpc", {"temperature": 0.0}),
    "seeded": ("grpc", {"temperature": 0.9, "top_p": 0.95}),
    "stream": ("sse", {"temperature": 0.0}),
    "n": ("grpc", {"temperature": 0.8, "n": 2}),
    "logprobs": ("grpc", {"temperature": 0.0, "logprobs": 3}),
    "structured": ("grpc", {"temperature": 0.7, "ignore_eos": False, "min_tokens": 0}),
    "plain": ("http", {"temperature": 0.7}),
    "penalties": ("grpc", {"temperature": 0.9, "presence_penalty": 0.6, "frequency_penalty": 0.4}),
    "stop": ("sse", {"temperature": 0.9, "stop": (" the", "er")}),
}
NOT_OF_FAKE: Final = ("structured",)


def kinds_of(engine: str) -> list[str]:
    """The features that an engine has."""
    return [kind for kind in KINDS if engine != "fake" or kind not in NOT_OF_FAKE]


@cache
def _workload() -> tuple[Trace, str, Sequence[tuple[int, TraceRequest]]]:
    trace = load_trace(TRACE)
    return trace, trace.digest(), shape_workload(trace, _SHAPE).rows


def make_asks(
    count: int, *, seed: int, vocab_size: int, kinds: Sequence[str], first: int = 0
) -> list[Ask]:
    """``count`` requests of the trace from row ``first`` on, and numbered so: none shares a prompt
    with another number's, or another seed's."""
    trace, digest, rows = _workload()
    maker = PromptMaker(
        trace.meta,
        digest=digest,
        seed=seed,
        token_range=ordinary_tokens(vocab_size),
        block_size=None,
    )
    asks = []
    for number in range(first, first + count):
        index, row = rows[number % len(rows)]
        kind = kinds[number % len(kinds)]
        face, more = KINDS[kind]
        length = max(_LEAST_OUTPUT, row.output_tokens)
        values: dict[str, object] = {"ignore_eos": True, "seed": 1000 * seed + number, **more}
        if kind == "structured":
            values["structured_output"] = _structured()
        sampling = SamplingParams(max_tokens=length, **values)  # type: ignore[arg-type]
        prompt = tuple(maker.tokens(f"{index}/{number}", row))
        asks.append(Ask(number, kind, face, prompt, sampling))
    return asks
