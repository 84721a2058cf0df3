"""Keeps an incident capsule of each answer that a scenario found wrong or lost, for `pdserve
replay`. It is the router's, with the right answer; where no router has one, it has what the client
knows."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import structs

from benchmarks.chaos.scenarios import REPEATED
from pdserve.errors import PdserveError
from pdserve.observe.capsules import Capsule, CapsuleAnswer, CapsuleHeader, seal, unseal
from pdserve.security.local import write_private

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from benchmarks.chaos.load import ObservedAnswer, Question
    from benchmarks.chaos.scenarios import Run

MOST: Final = 5  # of a scenario
REASON: Final = "chaos"


async def keep_capsules(
    scenario: str,
    run: Run,
    bad: Iterable[ObservedAnswer],
    expected: Mapping[int, ObservedAnswer],
    folder: Path,
) -> list[str]:
    """Write a capsule of a bad answer to each question, at most MOST, and return the files."""
    found = []
    by_question = {x.number % REPEATED: x for x in bad}
    for number, answer in [*by_question.items()][:MOST]:
        data = await run.service.capsule(answer.request_id) if answer.request_id else None
        question = run.questions[number]
        model = question.model or run.service.ready["model"]
        capsule = _capsule(data, answer, question, model)
        capsule.header = structs.replace(capsule.header, reason=REASON)
        by_index = {x.index: x for x in capsule.answers}
        for index, right in expected[number].choices.items():
            if index not in by_index:
                by_index[index] = CapsuleAnswer(index=index, tokens=[])
            by_index[index].expected = right.token_ids
        capsule.answers = [x for _, x in sorted(by_index.items())]
        found.append(_write(folder, f"{scenario}-{answer.number}.capsule", capsule))
    return found


def _write(folder: Path, name: str, capsule: Capsule) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    write_private(folder / name, seal(capsule))
    return str(folder / name)


def _capsule(data: bytes | None, answer: ObservedAnswer, question: Question, model: str) -> Capsule:
    """Return the router's capsule, or one of what the client knows."""
    received = {index: x.token_ids for index, x in answer.choices.items()}
    if data is not None:
        try:
            capsule = unseal(data)
        except PdserveError:
            pass  # encrypted with the key of another configuration
        else:
            sent = {x.index: x.tokens for x in capsule.answers}
            if any(sent.get(index, [])[: len(x)] != x for index, x in received.items()):
                capsule.message += f" (the client received other tokens: {received})"
            return capsule
    header = CapsuleHeader(
        request_id=answer.request_id, model=model, code=answer.code, created=time.time()
    )
    return Capsule(
        header=header,
        prompt_tokens=len(question.prompt),
        prompt=[*question.prompt],
        sampling=msgspec.to_builtins(question.sampling, str_keys=True),
        answers=[
            CapsuleAnswer(index=index, tokens=x.token_ids, finish_reason=x.finish)
            for index, x in answer.choices.items()
        ],
        message=answer.error,
    )
