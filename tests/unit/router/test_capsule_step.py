"""Which requests leave evidence and capsules, and the bounds of both."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from pdserve.config import CapsulesConfig
from pdserve.errors import (
    AnswerAborted,
    Cancelled,
    InvalidRequest,
    NotFound,
    Overloaded,
    PdserveError,
    PoisonRequest,
    WorkerFailed,
)
from pdserve.observe.capsules import unseal
from pdserve.types import Constraint as Kind
from pdserve.types import GenerateRequest, SamplingParams, ServiceClass, StructuredOutput
from router.attempt.answer import AnswerDelta, Discard
from router.attempt.streams import Answer
from router.attempt.suspects import Suspicion
from router.placement.decisions import DecisionLog
from router.steps.capsule import Capsules, CapsuleStep, RecentEvidence
from router.steps.evidence import Evidence, evidence_of
from router.store.capsules import CapsuleStore
from router.walk import Answered, RequestRecord, Walk

if TYPE_CHECKING:
    from pathlib import Path

    from pdserve.observe.capsules import CapsuleHeader

PROMPT = tuple(range(100))


def record(request_id: str = "r") -> RequestRecord:
    return RequestRecord(
        request_id=request_id,
        model="m",
        tenant="t",
        session="",
        service_class=ServiceClass.INTERACTIVE,
        prompt_tokens=len(PROMPT),
        arrived=0.0,
        admitted=1.0,
        answers=[Answer(Discard(), 4, [5, 6])],
    )


def request(request_id: str = "r", **changes: Any) -> GenerateRequest:
    return GenerateRequest(request_id, "m", PROMPT, SamplingParams(stop=("x",)), **changes)


def evidence(request_id: str = "r", **changes: Any) -> Evidence:
    asked = request(request_id, **changes)
    return evidence_of(asked, record(request_id), [], 2.0, None, with_prompt=True)


def made(tmp_path: Path, **changes: Any) -> tuple[Capsules, list[tuple[str, ...]]]:
    """Return capsules in a folder, and what they count."""
    config = CapsulesConfig(directory=str(tmp_path / "kept"), **changes)
    counted: list[tuple[str, ...]] = []
    topology = {"region": "eu"}
    store = CapsuleStore(config)
    capsules = Capsules(
        config, store, topology=topology, count=lambda *labels: counted.append(labels)
    )
    return capsules, counted


@pytest.mark.parametrize(
    ("error", "is_kept"),
    [
        (None, False),
        (WorkerFailed("it died"), True),
        (PoisonRequest("it kills"), True),
        (ValueError("a bug"), True),
        (Overloaded("full"), False),
        (AnswerAborted("by an administrator"), False),
        (InvalidRequest("a field"), False),
        (Cancelled("left"), False),
        (asyncio.CancelledError(), False),
    ],
)
async def test_failures_of_the_service_leave_a_capsule_and_others_evidence(
    tmp_path: Path, error: BaseException | None, is_kept: bool
) -> None:
    capsules, counted = made(tmp_path)
    step = CapsuleStep(capsules, DecisionLog(8), lambda: 2.0)
    walk = Walk(request(), Discard(), record(), Suspicion())

    async def proceed(walk: Walk) -> Answered:
        if error is not None:
            raise error
        return Answered(walk.record.answers, AnswerDelta())

    if error is None:
        await step(walk, proceed)
    else:
        with pytest.raises(type(error)):
            await step(walk, proceed)
    await capsules.close()
    assert counted == ([("capsules", "failure", "kept")] if is_kept else [])
    (found,) = capsules.recent.of("r")
    if isinstance(error, PdserveError):
        assert (found.code, found.message) == (error.code, error.message)


async def test_a_request_that_was_never_admitted_leaves_nothing(tmp_path: Path) -> None:
    capsules, counted = made(tmp_path)
    entry = record()
    entry.admitted = 0.0

    async def proceed(walk: Walk) -> Answered:
        raise WorkerFailed("no worker")

    step = CapsuleStep(capsules, DecisionLog(8), lambda: 2.0)
    with pytest.raises(WorkerFailed):
        await step(Walk(request(), Discard(), entry, Suspicion()), proceed)
    await capsules.close()
    assert (counted, capsules.recent.of("r")) == ([], [])


async def test_data_that_may_not_be_stored_here_is_neither_kept_nor_remembered(
    tmp_path: Path,
) -> None:
    capsules, counted = made(tmp_path)
    for region in ("us", "eu"):
        capsules.add(evidence(region, storage=frozenset({region})), failed=True)
    await capsules.close()
    assert counted == [("capsules", "failure", "elsewhere"), ("capsules", "failure", "kept")]
    assert [x.header.region for x in await capsules.listed()] == ["eu"]
    with pytest.raises(NotFound) as unknown:
        await capsules.get("us")
    assert unknown.value.field == "request_id"


async def test_a_disk_that_is_too_slow_drops_capsules(tmp_path: Path) -> None:
    capsules, counted = made(tmp_path)
    for number in range(65):
        capsules.keep(evidence(f"r{number}"), "audit")
    assert counted == [("capsules", "audit", "dropped")]


class FullDisk(CapsuleStore):
    def keep(self, header: CapsuleHeader, data: bytes) -> None:
        raise OSError("no space left")


async def test_a_full_disk_is_counted_and_the_capsule_is_still_returned(tmp_path: Path) -> None:
    counted: list[tuple[str, ...]] = []
    config = CapsulesConfig(directory=str(tmp_path))
    capsules = Capsules(config, FullDisk(config), count=lambda *labels: counted.append(labels))
    capsules.add(evidence())
    header, data = await capsules.get("r")
    assert unseal(data).header == header
    assert counted == [("capsules", "demand", "failed")]


def test_recent_evidence_is_bounded_by_number_and_bytes() -> None:
    one = evidence("r0")
    for recent, left in (
        (RecentEvidence(2), ["r1", "r2"]),
        (RecentEvidence(9, most_bytes=one.size * 2), ["r1", "r2"]),
        (RecentEvidence(0), []),
    ):
        for name in ("r0", "r1", "r1", "r2"):
            recent.keep(name, [evidence(name)])
        assert [x for x in ("r0", "r1", "r2") if recent.of(x)] == left


async def test_the_last_capsule_of_a_request_is_returned_by_the_name_a_client_chose(
    tmp_path: Path,
) -> None:
    capsules, _ = made(tmp_path)
    found = evidence("chatcmpl-mine")
    capsules.add(found, failed=True)
    capsules.keep(found, "audit", {0: [5, 7]})
    header, data = await capsules.get("mine")
    assert (header.request_id, header.reason) == ("chatcmpl-mine", "audit")
    assert unseal(data).answers[0].expected == [5, 7]


async def test_without_prompts_no_text_of_the_request_is_kept(tmp_path: Path) -> None:
    constraint = StructuredOutput(Kind.REGEX, "secret")
    asked = request()
    asked.sampling.structured_output = constraint
    capsules, _ = made(tmp_path)
    capsules.add(evidence_of(asked, record(), [], 2.0, None, with_prompt=False))
    _, data = await capsules.get("r")
    found = unseal(data)
    assert (found.prompt, found.prompt_tokens) == (None, 100)
    assert found.sampling["stop"] == []
    assert found.sampling["structured_output"] == {"kind": "regex"}
