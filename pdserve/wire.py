"""Convert types to protobuf and back. Wrong input raises InvalidRequest naming the field."""

from __future__ import annotations

import math
import re
from itertools import compress
from operator import attrgetter, ne
from typing import TYPE_CHECKING, Any, TypeVar, cast

from pdserve import types as t
from pdserve.errors import ErrorInfo, InvalidRequest, PdserveError
from pdserve.step_moments import Moments, StepMoments
from pdserve.v1 import common_pb2 as c
from pdserve.v1 import worker_pb2 as w

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

T = TypeVar("T")
M = TypeVar("M")

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

# Fields that a request may leave unset; 0 is a value of its own.
_OPTIONAL_SAMPLING = (
    *("n", "temperature", "top_p", "top_k", "min_p", "seed", "min_tokens", "presence_penalty"),
    *("frequency_penalty", "repetition_penalty", "logprobs", "skip_special_tokens"),
)
_FLAG_SAMPLING = ("include_stop_str_in_output", "ignore_eos")
_SAMPLING = (*_OPTIONAL_SAMPLING, *_FLAG_SAMPLING, "stop", "stop_token_ids", "logit_bias")
_sampling_of = attrgetter(*_SAMPLING)
_DEFAULTS = _sampling_of(t.SamplingParams())
_TOTAL_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}", re.ASCII)


def _fields_of(cls: type[Any], source: object) -> dict[str, Any]:
    """Return the fields of the dataclass `cls` from an instance or a message of equal names."""
    return {name: getattr(source, name) for name in cls.__slots__}


def _codec(cls: type[T], pb: Callable[..., M]) -> tuple[Callable[[T], M], Callable[[M], T]]:
    """Return the functions that convert `cls` to and from a message with the same fields."""
    names: tuple[str, ...] = cls.__slots__  # type: ignore[attr-defined]

    def write(value: T) -> M:
        return pb(**{name: getattr(value, name) for name in names})

    def read(message: M) -> T:
        return cls(**{name: getattr(message, name) for name in names})

    return write, read


_error_to_pb, error_from_pb = _codec(ErrorInfo, c.Error)
usage_to_pb, usage_from_pb = _codec(t.Usage, c.Usage)
receipt_to_pb, _receipt_from_pb = _codec(t.Receipt, c.Receipt)
load_to_pb, load_from_pb = _codec(t.WorkerLoad, w.WorkerLoad)
_logprob_to_pb, _logprob_from_pb = _codec(t.TokenLogprob, c.TokenLogprob)
_transfer_to_pb, _transfer_from_pb = _codec(t.TransferReport, w.TransferReport)
_model_to_pb, _model_from_pb = _codec(t.ModelInfo, w.ModelInfo)
_moments_to_pb, _ = _codec(Moments, w.Moments)
_ledger_to_pb, ledger_from_pb = _codec(t.KvLedger, w.KvLedger)


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
    """Defaults are left out, because requests set few fields."""
    values = _sampling_of(params)
    differs = map(ne, values, _DEFAULTS)
    given: dict[str, Any] = dict(compress(zip(_SAMPLING, values, strict=True), differs))
    out = c.SamplingParams(max_tokens=params.max_tokens, **given)
    if params.structured_output is not None:
        out.structured_output.CopyFrom(_structured_to_pb(params.structured_output))
    return out


def sampling_from_pb(message: c.SamplingParams, *, default_max_tokens: int) -> t.SamplingParams:
    """Unset fields get vLLM's defaults, except `max_tokens`."""
    values: dict[str, Any] = {
        name: getattr(message, name) for name in _OPTIONAL_SAMPLING if message.HasField(name)
    }
    values.update({name: getattr(message, name) for name in _FLAG_SAMPLING})
    for name, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise InvalidRequest(f"{name} must be a finite number", field=name)
    structured = None
    if message.HasField("structured_output"):
        structured = _structured_from_pb(message.structured_output)
    return t.SamplingParams(
        max_tokens=message.max_tokens if message.HasField("max_tokens") else default_max_tokens,
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        logit_bias=dict(message.logit_bias),
        structured_output=structured,
        **values,
    )


def _structured_to_pb(value: t.StructuredOutput) -> c.StructuredOutput:
    if value.kind is t.Constraint.CHOICE:
        return c.StructuredOutput(choice=c.StructuredOutput.Choices(value=value.choices))
    given = True if value.kind is t.Constraint.JSON_OBJECT else value.value
    return c.StructuredOutput(**cast("dict[str, Any]", {value.kind.value: given}))


def _structured_from_pb(message: c.StructuredOutput) -> t.StructuredOutput:
    kind = message.WhichOneof("constraint")
    if kind is None or (kind == "json_object" and not message.json_object):
        raise InvalidRequest("structured_output needs a constraint", field="structured_output")
    if kind == "choice":
        return t.StructuredOutput(t.Constraint.CHOICE, choices=tuple(message.choice.value))
    value = "" if kind == "json_object" else getattr(message, kind)
    return t.StructuredOutput(t.Constraint(kind), value)


def logprobs_to_pb(values: tuple[t.PositionLogprobs, ...]) -> list[c.PositionLogprobs]:
    return [
        c.PositionLogprobs(sampled=_logprob_to_pb(v.sampled), top=map(_logprob_to_pb, v.top))
        for v in values
    ]


def logprobs_from_pb(messages: Iterable[c.PositionLogprobs]) -> tuple[t.PositionLogprobs, ...]:
    return tuple(
        t.PositionLogprobs(_logprob_from_pb(m.sampled), tuple(map(_logprob_from_pb, m.top)))
        for m in messages
    )


def stop_reason_to_pb(reason: str | int | None) -> c.StopReason | None:
    if reason is None:
        return None
    return c.StopReason(text=reason) if isinstance(reason, str) else c.StopReason(token_id=reason)


def stop_reason_from_pb(message: c.StopReason) -> str | int | None:
    kind = message.WhichOneof("reason")
    return None if kind is None else cast("str | int", getattr(message, kind))


def error_to_pb(error: PdserveError | ErrorInfo) -> c.Error:
    return _error_to_pb(cast("ErrorInfo", error))  # both have the same fields


def receipt_from_pb(message: c.Receipt) -> t.Receipt:
    receipt = _receipt_from_pb(message)
    receipt.fallbacks = tuple(message.fallbacks)
    return receipt


def report_to_pb(report: t.PhaseReport) -> w.PhaseReport:
    values = _fields_of(t.PhaseReport, report)
    values["transfer"] = report.transfer and _transfer_to_pb(report.transfer)
    return w.PhaseReport(**values)


def report_from_pb(message: w.PhaseReport) -> t.PhaseReport:
    values = _fields_of(t.PhaseReport, message)
    has_transfer = message.HasField("transfer")
    values["transfer"] = _transfer_from_pb(message.transfer) if has_transfer else None
    return t.PhaseReport(**values)


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


def delta_from_pb(message: w.StreamDelta) -> t.StreamDelta:
    finish = message.finish_reason
    logprobs = logprobs_from_pb(message.logprobs) if message.logprobs else ()
    if not finish:
        # The common case, once a token: optional fields are not read.
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


def is_plain(delta: t.StreamDelta) -> bool:
    """Return True if the delta is one token of a stream that continues: the common case."""
    return delta.finish_reason is None and len(delta.token_ids) == 1 and not delta.logprobs


def plain_to_pb(rows: list[tuple[int, int, str]]) -> w.PlainTokens:
    """Return plain deltas, given as (stream id, token id, text)."""
    stream_ids, token_ids, texts = zip(*rows, strict=True)
    return w.PlainTokens(stream_ids=stream_ids, token_ids=token_ids, texts=texts)


def moments_to_pb(moments: StepMoments) -> w.StepMoments:
    prefill, decode = _moments_to_pb(moments.prefill), _moments_to_pb(moments.decode)
    return w.StepMoments(prefill=prefill, decode=decode)


def moments_from_pb(message: w.StepMoments) -> StepMoments:
    """Raises InvalidRequest for figures that cannot be sums over steps."""

    def one(x: w.Moments, name: str) -> Moments:
        if not x.steps:
            return Moments()
        moments = Moments(x.steps, x.end, tuple(x.xx), tuple(x.xy), x.yy)
        if not moments.is_sound:
            raise InvalidRequest(f"steps.{name} has no sums over steps", field=f"steps.{name}")
        return moments

    return StepMoments(one(message.prefill, "prefill"), one(message.decode, "decode"))


def ledger_to_pb(ledger: t.KvLedger) -> w.KvLedger:
    message = _ledger_to_pb(ledger)
    message.pinned_blocks = ledger.pinned_blocks
    return message


def kv_report_to_pb(report: t.KvReport) -> w.KvReport:
    figures = _fields_of(t.KvReport, report)
    return w.KvReport(**{**figures, "ledger": ledger_to_pb(report.ledger)})


def kv_report_from_pb(message: w.KvReport) -> t.KvReport:
    """Raises InvalidRequest for names that no metric can have and for totals below 0."""
    figures = _fields_of(t.KvReport, message)
    figures["ledger"] = ledger_from_pb(message.ledger)
    figures["links"], figures["totals"] = dict(message.links), dict(message.totals)
    for name, value in figures["totals"].items():
        if not _TOTAL_NAME.fullmatch(name) or not 0 <= value < math.inf:
            raise InvalidRequest(f"kv.totals: {name[:64]!r} is not a count", field="kv.totals")
    return t.KvReport(**figures)


_WORKER_PLAIN = (
    *("worker_id", "instance_id", "address", "block_size", "total_blocks", "max_num_seqs", "pid"),
    *("engine", "debug_address", "session_address"),
)


def worker_to_pb(info: t.WorkerInfo) -> w.WorkerInfo:
    plain: dict[str, Any] = {name: getattr(info, name) for name in _WORKER_PLAIN}
    kv = None
    if info.kv is not None:
        kv = w.KvEndpoint(
            addresses=info.kv.addresses,
            compatibility=info.kv.compatibility,
            layout=dict(info.kv.layout),
            transports=info.kv.transports,
            sequential=info.kv.handoff is t.HandoffStyle.SEQUENTIAL,
        )
    settings = dict(info.settings)
    return w.WorkerInfo(
        role=role_to_pb(info.role),
        model=_model_to_pb(info.model),
        kv=kv,
        settings=settings,
        **plain,
    )


def worker_from_pb(message: w.WorkerInfo) -> t.WorkerInfo:
    """Raises InvalidRequest for a message that lacks what routing needs."""
    for name in _WORKER_PLAIN[:6]:
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
    return t.WorkerInfo(
        role=role_from_pb(message.role),
        model=_model_from_pb(message.model),
        kv=kv,
        settings=dict(message.settings),
        **{name: getattr(message, name) for name in _WORKER_PLAIN},
    )
