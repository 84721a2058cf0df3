"""What is known of an ended request, and the capsule that is made of it when somebody wants one."""

from __future__ import annotations

import platform
import time
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct, structs

from pdserve import __version__, wire
from pdserve.model import prefix_hash
from pdserve.observe.capsules import (
    DEMAND,
    Capsule,
    CapsuleAnswer,
    CapsuleHeader,
    CapsuleSpan,
    CapsuleStream,
)
from router.attempt.receipt import sampled_by
from router.placement.decisions import explained

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pdserve.errors import PdserveError
    from pdserve.types import GenerateRequest, Receipt, SamplingParams, WorkerInfo
    from router.attempt.streams import WorkerStream
    from router.placement.decisions import RecordedDecision
    from router.walk import RequestRecord

_FIXED_BYTES, _TOKEN_BYTES, _ID_BYTES = 4096, 36, 4  # a token of an answer is an int in a list
# Fields of a registration that are not of interest, or are secret addresses.
_WORKER_FIELDS = (
    *("instance_id", "role", "engine", "device", "devices", "block_size", "total_blocks"),
    *("settings", "topology", "revision", "limits", "group"),
)


class EndedAnswer(Struct, frozen=True, eq=False):
    """An answer without the connection of its client, which would stay in memory."""

    index: int
    tokens: Sequence[int]
    finish_reason: str
    retries: Sequence[str]
    streams: Sequence[WorkerStream]
    copies: Sequence[WorkerStream]


class Evidence(Struct, frozen=True, eq=False, kw_only=True):
    """An ended request. Nothing is computed before a capsule is made, because few are. `now`: its
    end, on the clock of the record. `size`: estimated bytes in memory."""

    request: GenerateRequest
    prompt_tokens: int
    record: RequestRecord
    answers: Sequence[EndedAnswer]
    decisions: Sequence[RecordedDecision]
    now: float
    unix_time: float
    size: int
    code: str = ""
    message: str = ""


def evidence_of(
    request: GenerateRequest,
    record: RequestRecord,
    decisions: Sequence[RecordedDecision],
    now: float,
    error: PdserveError | None = None,
    *,
    with_prompt: bool,
) -> Evidence:
    """Return what is known of a request that just ended. It must be called before the record
    leaves the open requests, which forgets the answers."""
    prompt = request.prompt_token_ids if with_prompt else ()
    answers = [
        EndedAnswer(x.index, x.tokens, x.finish_reason, x.retries, x.streams, x.copies)
        for x in record.answers
    ]
    size = _FIXED_BYTES + _ID_BYTES * len(prompt)
    for answer in answers:
        size += _TOKEN_BYTES * len(answer.tokens)
    return Evidence(
        request=structs.replace(request, prompt_token_ids=prompt, pixels=None, parsing=None),
        prompt_tokens=len(request.prompt_token_ids),
        record=record,
        answers=answers,
        decisions=decisions,
        now=now,
        unix_time=time.time(),
        size=size,
        code="" if error is None else error.code,
        message="" if error is None else error.message,
    )


def capsule_of(
    evidence: Evidence,
    *,
    reason: str = DEMAND,
    region: str = "",
    settings: Mapping[str, Any] | None = None,
    expected: Mapping[int, Sequence[int]] | None = None,
) -> Capsule:
    """Return the capsule of an ended request. `reason`: why it is kept. `expected`: by index of the
    answer, its first right tokens. Takes milliseconds for a long prompt: call it in a thread."""
    request, record, expected = evidence.request, evidence.record, expected or {}
    has_prompt = bool(request.prompt_token_ids)
    header = CapsuleHeader(
        request_id=request.request_id,
        model=request.served_name,
        tenant=request.tenant,
        reason=reason,
        code=evidence.code,
        created=evidence.unix_time,
        region=region,
    )
    streams = [x for y in evidence.answers for x in (*y.copies, *y.streams)]
    workers = {x.worker_id: x.member.info for x in streams}
    explanation = explained(list(evidence.decisions))
    return Capsule(
        header=header,
        prompt_tokens=evidence.prompt_tokens,
        sampling=_sampling(request.sampling, with_texts=has_prompt),
        prompt=list(request.prompt_token_ids) if has_prompt else None,
        answers=[_answer(x, expected.get(x.index)) for x in evidence.answers],
        message=evidence.message,
        adapter=request.adapter_key,
        service_class=request.service_class.value,
        trace_id=record.trace_id,
        unlike=_unlike(request, record.receipt),
        versions={"pdserve": __version__, "python": platform.python_version()},
        settings=dict(settings or {}),
        workers={name: _worker(info) for name, info in workers.items()},
        blocks=_blocks(request, {x.block_size for x in workers.values()}) if has_prompt else {},
        placement=wire.json_object(explanation) if evidence.decisions else {},
        timing={
            "admitted_s": record.admitted - record.arrived,
            "first_token_s": record.ttft_s,
            "ended_s": evidence.now - record.arrived,
        },
        usage=msgspec.to_builtins(record.usage),
        receipt=msgspec.to_builtins(record.receipt),
    )


def _answer(answer: EndedAnswer, expected: Sequence[int] | None) -> CapsuleAnswer:
    spans = []
    for stream, start, end in sampled_by(answer.streams, len(answer.tokens)):
        source = stream.pair[0] if stream.pair is not None else ""
        own = source in ("", stream.worker_id)
        spans.append(CapsuleSpan(stream.worker_id, start, end, "" if own else source))
    return CapsuleAnswer(
        index=answer.index,
        tokens=[*answer.tokens],
        finish_reason=str(answer.finish_reason),
        retries=[*answer.retries],
        spans=spans,
        streams=[_stream(x) for x in answer.streams],
        copies=[_stream(x) for x in answer.copies],
        expected=None if expected is None else [*expected],
        expected_is_part=expected is not None,
    )


def _stream(stream: WorkerStream) -> CapsuleStream:
    return CapsuleStream(
        worker=stream.worker_id,
        instance=stream.member.info.instance_id,
        role=stream.role.value,
        side=stream.side.name.lower(),
        pair=() if stream.pair is None else (stream.pair[0], stream.pair[1]),
        cause=stream.cause,
        from_token=stream.from_token,
        weights="" if stream.weights is None else stream.weights.version,
        died=stream.died,
        report=msgspec.to_builtins(stream.report),
    )


def _worker(info: WorkerInfo) -> dict[str, Any]:
    found = {name: getattr(info, name) for name in _WORKER_FIELDS}
    if info.kv is not None:
        found["kv_layout"], found["transports"] = info.kv.layout, info.kv.transports
    built: dict[str, Any] = msgspec.to_builtins(found)
    return built


def _sampling(sampling: SamplingParams, *, with_texts: bool) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.to_builtins(sampling, str_keys=True)
    if not with_texts:
        found["stop"] = []
        if sampling.structured_output is not None:
            found["structured_output"] = {"kind": sampling.structured_output.kind.value}
    return found


def _unlike(request: GenerateRequest, receipt: Receipt | None) -> list[str]:
    """Return what the API with which a capsule is replayed cannot express."""
    found = []
    if receipt is not None and receipt.stale_kv_tokens:
        found.append("tokens attended to KV of older weights")
    if request.media:
        found.append("the prompt has images, which are not kept")
    if request.reasoning_gate is not None:
        found.append("the grammar began after the reasoning")
    return found


def _blocks(request: GenerateRequest, sizes: set[int]) -> dict[str, list[str]]:
    """Return the names of the prompt's full blocks. Those of images need their hashes."""
    if request.media:
        return {}
    found = {}
    for size in sorted(x for x in sizes if x):
        root = prefix_hash.root(request.model, size, request.adapter_key, request.cache_salt)
        chain = prefix_hash.chain(request.prompt_token_ids, size, root)
        found[str(size)] = [f"{x:016x}" for x in chain]
    return found
