"""Types to protobuf and back; nothing else converts. Bad input raises InvalidRequest naming the
field."""

from __future__ import annotations

import math
import re
from dataclasses import fields
from operator import attrgetter
from typing import Any

from pdserve import types as t
from pdserve.errors import InvalidRequest, PdserveError
from pdserve.v1 import common_pb2 as c
from pdserve.v1 import worker_pb2 as w

_FINISH_TO_PB = {
    None: c.FINISH_REASON_UNSPECIFIED,
    t.FinishReason.STOP: c.FINISH_REASON_STOP,
    t.FinishReason.LENGTH: c.FINISH_REASON_LENGTH,
    t.FinishReason.ABORT: c.FINISH_REASON_ABORT,
    t.FinishReason.ERROR: c.FINISH_REASON_ERROR,
}
_FINISH_FROM_PB = {v: k for k, v in _FINISH_TO_PB.items()}
_ROLE_TO_PB = {
    t.Role.PREFILL: w.ROLE_PREFILL,
    t.Role.DECODE: w.ROLE_DECODE,
    t.Role.AGGREGATED: w.ROLE_AGGREGATED,
}
_ROLE_FROM_PB = {v: k for k, v in _ROLE_TO_PB.items()}

_OPTIONAL_SAMPLING = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "min_tokens",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logprobs",
    "skip_special_tokens",
)
_TOTAL_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}", re.ASCII)
_LOAD = tuple(f.name for f in fields(t.WorkerLoad))
_FLAG_SAMPLING = ("include_stop_str_in_output", "ignore_eos")
_SAMPLING = (*_OPTIONAL_SAMPLING, *_FLAG_SAMPLING, "stop", "stop_token_ids", "logit_bias")
_sampling_of = attrgetter(*_SAMPLING)
_DEFAULTS = _sampling_of(t.SamplingParams())


def finish_to_pb(reason: t.FinishReason | None) -> c.FinishReason:
    return _FINISH_TO_PB[reason]


def finish_from_pb(reason: c.FinishReason) -> t.FinishReason | None:
    if reason not in _FINISH_FROM_PB:
        raise InvalidRequest(f"unknown finish_reason {reason}", field="finish_reason")
    return _FINISH_FROM_PB[reason]


def role_to_pb(role: t.Role) -> w.Role:
    return _ROLE_TO_PB[role]


def role_from_pb(role: w.Role) -> t.Role:
    if role not in _ROLE_FROM_PB:
        raise InvalidRequest(f"unknown role {role}", field="role")
    return _ROLE_FROM_PB[role]


def sampling_to_pb(params: t.SamplingParams) -> c.SamplingParams:
    """What is as its default is left out: requests set few of these."""
    values = zip(_SAMPLING, _sampling_of(params), _DEFAULTS, strict=True)
    given: dict[str, Any] = {name: value for name, value, default in values if value != default}
    out = c.SamplingParams(max_tokens=params.max_tokens, **given)
    if params.structured_output is not None:
        out.structured_output.CopyFrom(_structured_to_pb(params.structured_output))
    return out


def sampling_from_pb(message: c.SamplingParams, *, default_max_tokens: int) -> t.SamplingParams:
    """Unset fields take vLLM's defaults, except `max_tokens`, which takes `default_max_tokens`."""
    values: dict[str, Any] = {
        name: getattr(message, name) for name in _OPTIONAL_SAMPLING if message.HasField(name)
    }
    values.update({name: getattr(message, name) for name in _FLAG_SAMPLING})
    for name, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise InvalidRequest(f"{name} must be a finite number", field=name)
    return t.SamplingParams(
        max_tokens=message.max_tokens if message.HasField("max_tokens") else default_max_tokens,
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        logit_bias=dict(message.logit_bias),
        structured_output=(
            _structured_from_pb(message.structured_output)
            if message.HasField("structured_output")
            else None
        ),
        **values,
    )


def _structured_to_pb(value: t.StructuredOutput) -> c.StructuredOutput:
    match value.kind:
        case t.Constraint.JSON_SCHEMA:
            return c.StructuredOutput(json_schema=value.value)
        case t.Constraint.JSON_OBJECT:
            return c.StructuredOutput(json_object=True)
        case t.Constraint.REGEX:
            return c.StructuredOutput(regex=value.value)
        case t.Constraint.CHOICE:
            return c.StructuredOutput(choice=c.StructuredOutput.Choices(value=value.choices))
        case t.Constraint.GRAMMAR:
            return c.StructuredOutput(grammar=value.value)


def _structured_from_pb(message: c.StructuredOutput) -> t.StructuredOutput:
    kind = message.WhichOneof("constraint")
    if kind is None or (kind == "json_object" and not message.json_object):
        raise InvalidRequest("structured_output needs a constraint", field="structured_output")
    if kind == "choice":
        return t.StructuredOutput(t.Constraint.CHOICE, choices=tuple(message.choice.value))
    value = "" if kind == "json_object" else getattr(message, kind)
    return t.StructuredOutput(t.Constraint(kind), value)


def _token_logprob_to_pb(value: t.TokenLogprob) -> c.TokenLogprob:
    return c.TokenLogprob(
        token_id=value.token_id, text=value.text, logprob=value.logprob, rank=value.rank
    )


def _token_logprob_from_pb(message: c.TokenLogprob) -> t.TokenLogprob:
    return t.TokenLogprob(message.token_id, message.text, message.logprob, message.rank)


def logprobs_to_pb(values: tuple[t.PositionLogprobs, ...]) -> list[c.PositionLogprobs]:
    return [
        c.PositionLogprobs(
            sampled=_token_logprob_to_pb(v.sampled), top=[_token_logprob_to_pb(x) for x in v.top]
        )
        for v in values
    ]


def stop_reason_to_pb(reason: str | int | None) -> c.StopReason | None:
    if reason is None:
        return None
    return c.StopReason(text=reason) if isinstance(reason, str) else c.StopReason(token_id=reason)


def stop_reason_from_pb(message: c.StopReason) -> str | int | None:
    match message.WhichOneof("reason"):
        case "text":
            return message.text
        case "token_id":
            return message.token_id
        case _:
            return None


def error_to_pb(error: PdserveError | t.ErrorInfo) -> c.Error:
    return c.Error(**{f.name: getattr(error, f.name) for f in fields(t.ErrorInfo)})


def error_from_pb(message: c.Error) -> t.ErrorInfo:
    return t.ErrorInfo(**{f.name: getattr(message, f.name) for f in fields(t.ErrorInfo)})


def usage_to_pb(usage: t.Usage) -> c.Usage:
    return c.Usage(**{f.name: getattr(usage, f.name) for f in fields(usage)})


def usage_from_pb(message: c.Usage) -> t.Usage:
    return t.Usage(message.prompt_tokens, message.completion_tokens, message.cached_tokens)


def receipt_to_pb(receipt: t.Receipt) -> c.Receipt:
    return c.Receipt(**{f.name: getattr(receipt, f.name) for f in fields(receipt)})


def receipt_from_pb(message: c.Receipt) -> t.Receipt:
    values = {f.name: getattr(message, f.name) for f in fields(t.Receipt)}
    return t.Receipt(**{**values, "fallbacks": tuple(message.fallbacks)})


def report_to_pb(report: t.PhaseReport) -> w.PhaseReport:
    transfer = report.transfer
    return w.PhaseReport(
        queue_s=report.queue_s,
        prefill_s=report.prefill_s,
        decode_s=report.decode_s,
        cached_tokens=report.cached_tokens,
        transfer=None
        if transfer is None
        else w.TransferReport(**{f.name: getattr(transfer, f.name) for f in fields(transfer)}),
    )


def report_from_pb(message: w.PhaseReport) -> t.PhaseReport:
    transfer = None
    if message.HasField("transfer"):
        x = message.transfer
        transfer = t.TransferReport(
            x.transfer_s, x.exposed_s, x.bytes, x.blocks, x.transport, x.digest_mismatches
        )
    return t.PhaseReport(
        message.queue_s, message.prefill_s, message.decode_s, message.cached_tokens, transfer
    )


def delta_to_pb(delta: t.StreamDelta) -> w.StreamDelta:
    out = w.StreamDelta(stream_id=delta.stream_id, token_ids=delta.token_ids, text=delta.text)
    if delta.logprobs:
        out.logprobs.extend(logprobs_to_pb(delta.logprobs))
    if delta.finish_reason is not None:
        out.finish_reason = _FINISH_TO_PB[delta.finish_reason]
        reason = stop_reason_to_pb(delta.stop_reason)
        if reason is not None:
            out.stop_reason.CopyFrom(reason)
        if delta.report is not None:
            out.report.CopyFrom(report_to_pb(delta.report))
        if delta.error is not None:
            out.error.CopyFrom(error_to_pb(delta.error))
        out.kv_handle = delta.kv_handle
        out.exported_tokens = delta.exported_tokens
    return out


def is_plain(delta: t.StreamDelta) -> bool:
    """Whether the delta is one token of a stream that goes on: the common case."""
    return delta.finish_reason is None and len(delta.token_ids) == 1 and not delta.logprobs


def plain_to_pb(rows: list[tuple[int, int, str]]) -> w.PlainTokens:
    """Plain deltas, each as stream id, token id and text."""
    stream_ids, token_ids, texts = zip(*rows, strict=True)
    return w.PlainTokens(stream_ids=stream_ids, token_ids=token_ids, texts=texts)


def logprobs_from_pb(messages: Any) -> tuple[t.PositionLogprobs, ...]:
    return tuple(
        t.PositionLogprobs(
            _token_logprob_from_pb(m.sampled), tuple(_token_logprob_from_pb(x) for x in m.top)
        )
        for m in messages
    )


def delta_from_pb(message: w.StreamDelta) -> t.StreamDelta:
    finish = message.finish_reason
    logprobs = logprobs_from_pb(message.logprobs) if message.logprobs else ()
    if not finish:
        # The common case, once per token: nothing optional is read.
        return t.StreamDelta(message.stream_id, tuple(message.token_ids), message.text, logprobs)
    return t.StreamDelta(
        message.stream_id,
        tuple(message.token_ids),
        message.text,
        logprobs,
        finish_from_pb(finish),
        stop_reason_from_pb(message.stop_reason) if message.HasField("stop_reason") else None,
        report_from_pb(message.report) if message.HasField("report") else None,
        error_from_pb(message.error) if message.HasField("error") else None,
        message.kv_handle,
        message.exported_tokens,
    )


def load_to_pb(load: t.WorkerLoad) -> w.WorkerLoad:
    return w.WorkerLoad(**{name: getattr(load, name) for name in _LOAD})


def load_from_pb(message: w.WorkerLoad) -> t.WorkerLoad:
    return t.WorkerLoad(**{name: getattr(message, name) for name in _LOAD})


def ledger_to_pb(ledger: t.KvLedger) -> w.KvLedger:
    figures = {f.name: getattr(ledger, f.name) for f in fields(ledger)}
    return w.KvLedger(pinned_blocks=ledger.pinned_blocks, **figures)


def ledger_from_pb(message: w.KvLedger) -> t.KvLedger:
    return t.KvLedger(**{f.name: getattr(message, f.name) for f in fields(t.KvLedger)})


def kv_report_to_pb(report: t.KvReport) -> w.KvReport:
    return w.KvReport(
        ledger=ledger_to_pb(report.ledger),
        quarantined_slots=report.quarantined_slots,
        links=report.links,
        totals=report.totals,
        held_bytes=report.held_bytes,
    )


def kv_report_from_pb(message: w.KvReport) -> t.KvReport:
    """Refuses names that no metric can have, and totals that are no counts."""
    totals = dict(message.totals)
    for name, value in totals.items():
        if not _TOTAL_NAME.fullmatch(name) or not 0 <= value < math.inf:
            raise InvalidRequest(f"kv.totals: {name[:64]!r} is not a count", field="kv.totals")
    return t.KvReport(
        ledger_from_pb(message.ledger),
        message.quarantined_slots,
        dict(message.links),
        totals,
        message.held_bytes,
    )


def worker_to_pb(info: t.WorkerInfo) -> w.WorkerInfo:
    model = w.ModelInfo(**{f.name: getattr(info.model, f.name) for f in fields(info.model)})
    kv = None
    if info.kv is not None:
        kv = w.KvEndpoint(
            addresses=info.kv.addresses,
            compatibility=info.kv.compatibility,
            layout=dict(info.kv.layout),
            transports=info.kv.transports,
            sequential=info.kv.handoff is t.HandoffStyle.SEQUENTIAL,
        )
    return w.WorkerInfo(
        worker_id=info.worker_id,
        instance_id=info.instance_id,
        role=role_to_pb(info.role),
        model=model,
        address=info.address,
        kv=kv,
        block_size=info.block_size,
        total_blocks=info.total_blocks,
        max_num_seqs=info.max_num_seqs,
        pid=info.pid,
        engine=info.engine,
        settings=dict(info.settings),
        debug_address=info.debug_address,
        session_address=info.session_address,
    )


def worker_from_pb(message: w.WorkerInfo) -> t.WorkerInfo:
    """Refuses a message that lacks what routing needs, naming the field."""
    for name in (
        "worker_id",
        "instance_id",
        "address",
        "block_size",
        "total_blocks",
        "max_num_seqs",
    ):
        if not getattr(message, name):
            raise InvalidRequest(f"worker.{name} is missing", field=f"worker.{name}")
    if not message.model.name or not message.model.max_model_len or not message.model.vocab_size:
        raise InvalidRequest("worker.model is incomplete", field="worker.model")
    kv = None
    if message.HasField("kv"):
        x = message.kv
        if not x.addresses:
            raise InvalidRequest("worker.kv.addresses is missing", field="worker.kv.addresses")
        style = t.HandoffStyle.SEQUENTIAL if x.sequential else t.HandoffStyle.CONCURRENT
        kv = t.KvEndpoint(
            tuple(x.addresses), x.compatibility, dict(x.layout), tuple(x.transports), style
        )
    m = message.model
    return t.WorkerInfo(
        worker_id=message.worker_id,
        instance_id=message.instance_id,
        role=role_from_pb(message.role),
        model=t.ModelInfo(m.name, m.path, m.max_model_len, m.vocab_size, m.dtype),
        address=message.address,
        kv=kv,
        block_size=message.block_size,
        total_blocks=message.total_blocks,
        max_num_seqs=message.max_num_seqs,
        pid=message.pid,
        engine=message.engine,
        settings=dict(message.settings),
        debug_address=message.debug_address,
        session_address=message.session_address,
    )
