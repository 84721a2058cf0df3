"""Conversion between types and protobuf. Invalid input raises InvalidRequest naming the field."""

from __future__ import annotations

import math
import re
from itertools import compress
from operator import attrgetter, ne
from typing import TYPE_CHECKING, Any, TypeVar, cast

from google.protobuf.json_format import MessageToDict

from pdserve import types as t
from pdserve.errors import ErrorInfo, InvalidRequest, PdserveError
from pdserve.model.token_ids import TokenIds
from pdserve.observe.step_costs import Moments, StepMoments
from pdserve.v1 import common_pb2 as c
from pdserve.v1 import worker_pb2 as w

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from google.protobuf.message import Message

    from pdserve.observe.step_costs import Step

T = TypeVar("T")
M = TypeVar("M")

_MAX_DRAIN_S = 86400.0

_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}", re.ASCII)

_FINISH_TO_PB: dict[t.FinishReason | None, c.FinishReason] = {
    None: c.FINISH_REASON_UNSPECIFIED,
    **{x: getattr(c, f"FINISH_REASON_{x.name}") for x in t.FinishReason},
}
_FINISH_FROM_PB = {v: k for k, v in _FINISH_TO_PB.items()}
_ROLE_TO_PB: dict[t.Role, w.Role] = {x: getattr(w, f"ROLE_{x.name}") for x in t.Role}
_ROLE_FROM_PB = {v: k for k, v in _ROLE_TO_PB.items()}


def is_name(text: str) -> bool:
    """Return True if a peer may use `text` as the name of a count or a reason. Such names become
    metric labels."""
    return _NAME.fullmatch(text) is not None


def json_object(message: Message) -> dict[str, Any]:
    """Return a message for printing as JSON, fields without a value included."""
    return MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )


def check_drain_timeout(seconds: float, *, field: str) -> None:
    """Raise InvalidRequest unless a drain may take this time: 0 to a day."""
    if not 0 <= seconds <= _MAX_DRAIN_S:  # NaN too
        raise InvalidRequest(f"{field} must be between 0 and {_MAX_DRAIN_S:g}", field=field)


def quiesce_mode(name: str) -> t.QuiesceMode:
    """Return the mode with this name. Raises InvalidRequest."""
    if name not in list(t.QuiesceMode):
        text = f"mode must be one of {', '.join(t.QuiesceMode)}, not {name!r}"
        raise InvalidRequest(text, field="mode")
    return t.QuiesceMode(name)


def set_prompt(submit: w.Submit, token_ids: Sequence[int]) -> bytes:
    """Set the prompt of a submit command. Return bytes to append to those of the command: they set
    the prompt, because protobuf merges the two. Empty if the message has it."""
    if not isinstance(token_ids, TokenIds):
        submit.prompt_token_ids.extend(token_ids)
        return b""
    prompt = _field(w.Submit.PROMPT_TOKEN_IDS_FIELD_NUMBER, token_ids.varints)
    return _field(w.Command.SUBMIT_FIELD_NUMBER, prompt)


def _field(number: int, content: bytes) -> bytes:
    """Return a protobuf field of bytes, with a number below 16."""
    begin, rest = [number << 3 | 2], len(content)
    while rest > 0x7F:
        begin.append(rest & 0x7F | 0x80)
        rest >>= 7
    return bytes((*begin, rest)) + content


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


def stop_reason_to_pb(reason: str | int | None) -> c.StopReason | None:
    if reason is None:
        return None
    return c.StopReason(text=reason) if isinstance(reason, str) else c.StopReason(token_id=reason)


def stop_reason_from_pb(message: c.StopReason) -> str | int | None:
    kind = message.WhichOneof("reason")
    return None if kind is None else cast("str | int", getattr(message, kind))


def _codec(
    cls: type[T],
    pb: Callable[..., M],
    *,
    optional: tuple[str, ...] = (),
    **fields: tuple[Callable[[Any], Any], Callable[[Any], Any]],
) -> tuple[Callable[[T], M], Callable[[M], T]]:
    """Return the functions that convert a dataclass or Struct to and from a message with the same
    fields.
    `fields` has the (write, read) converters of fields that are not simply copied. Fields in
    `optional` are None if the message lacks them."""
    names: tuple[str, ...] = cls.__match_args__  # type: ignore[attr-defined]
    values_of = attrgetter(*names)

    def write(value: T) -> M:
        values = dict(zip(names, values_of(value), strict=True))
        for name, (convert, _) in fields.items():
            if values[name] is not None:
                values[name] = convert(values[name])
        return pb(**values)

    # Positions in a list are faster than a dict, and the router reads a report for each request.
    reads = [(names.index(name), name in optional, name, x[1]) for name, x in fields.items()]

    def read(message: M) -> T:
        values = list(values_of(message))
        for at, is_optional, name, convert in reads:
            if is_optional and not message.HasField(name):  # type: ignore[attr-defined]
                values[at] = None
            else:
                values[at] = convert(values[at])
        return cls(*values)

    return write, read


_TUPLE = (tuple, tuple)
# Most maps are empty, and to copy one takes a microsecond.
_MAP = (dict, lambda x: dict(x) if x else {})
_LOGPROB = _codec(t.TokenLogprob, c.TokenLogprob)
_LOGPROBS = (lambda xs: map(_LOGPROB[0], xs), lambda xs: tuple(map(_LOGPROB[1], xs)))
_position_to_pb, _position_from_pb = _codec(
    t.PositionLogprobs, c.PositionLogprobs, sampled=_LOGPROB, top=_LOGPROBS
)


def logprobs_to_pb(values: Iterable[t.PositionLogprobs]) -> list[c.PositionLogprobs]:
    return list(map(_position_to_pb, values))


def logprobs_from_pb(messages: Sequence[c.PositionLogprobs]) -> tuple[t.PositionLogprobs, ...]:
    return tuple(map(_position_from_pb, messages)) if messages else ()


usage_to_pb, usage_from_pb = _codec(t.Usage, c.Usage)
_FLOAT = (float, float)
_span_to_pb, _span_from_pb = _codec(t.TokenSpan, c.TokenSpan)
_SPANS = (lambda xs: map(_span_to_pb, xs), lambda xs: tuple(map(_span_from_pb, xs)))
choice_to_pb, choice_from_pb = _CHOICE = _codec(
    t.ModelChoice,
    c.ModelChoice,
    optional=("discarded_cost",),
    skipped=_TUPLE,
    discarded_cost=_FLOAT,
)
receipt_to_pb, receipt_from_pb = _codec(
    t.Receipt,
    c.Receipt,
    optional=("cost", "energy_j", "model_choice"),
    model_choice=_CHOICE,
    fallbacks=_TUPLE,
    regions=_TUPLE,
    spans=_SPANS,
    cost=_FLOAT,
    energy_j=_FLOAT,
)
load_to_pb, load_from_pb = _codec(t.WorkerLoad, w.WorkerLoad, retentions_ended=_MAP)
_error_to_pb, error_from_pb = _ERROR = _codec(ErrorInfo, c.Error)
_TRANSFER = _codec(t.TransferReport, w.TransferReport)
_REPORT = _codec(
    t.PhaseReport,
    w.PhaseReport,
    optional=("transfer", "energy_j"),
    transfer=_TRANSFER,
    energy_j=_FLOAT,
)
_report_from_pb = _REPORT[1]
experts_to_pb, experts_from_pb = _EXPERTS = _codec(t.RoutedExperts, c.RoutedExperts)
weights_to_pb, weights_from_pb = _WEIGHTS = _codec(t.ModelWeights, w.ModelWeights)
_, _switch_from_pb = _SWITCH = _codec(t.WeightsSwitch, w.WeightsSwitch, weights=_WEIGHTS)
delta_to_pb = _codec(
    t.StreamDelta,
    w.StreamDelta,
    routed_experts=_EXPERTS,
    weights_switch=_SWITCH,
    token_ids=_TUPLE,
    logprobs=(logprobs_to_pb, logprobs_from_pb),
    prompt_logprobs=(logprobs_to_pb, logprobs_from_pb),
    finish_reason=(finish_to_pb, finish_from_pb),
    stop_reason=(stop_reason_to_pb, stop_reason_from_pb),
    report=_REPORT,
    error=_ERROR,
)[0]
adapter_to_pb, adapter_from_pb = _codec(t.Adapter, w.Adapter)
_ledger_to_pb, ledger_from_pb = _codec(t.KvLedger, w.KvLedger)
_MOMENTS = _codec(Moments, w.Moments, sums=_TUPLE)
moments_to_pb, _moments_from_pb = _codec(
    StepMoments, w.StepMoments, prefill=_MOMENTS, decode=_MOMENTS
)


media_to_pb, _media_from_pb = _codec(t.MediaItem, w.MediaItem)


def media_from_pb(messages: Sequence[w.MediaItem], prompt_tokens: int) -> tuple[t.MediaItem, ...]:
    """Return the media of a prompt with `prompt_tokens` tokens. Raises InvalidRequest naming the
    item, for example for placeholder tokens outside the prompt. Items may overlap: a text token
    between two images can belong to both."""
    before = -1
    for index, item in enumerate(messages):
        reason = ""
        if item.modality not in t.MODALITIES:
            reason = f"modality must be one of {', '.join(t.MODALITIES)}"
        elif not 0 < len(item.hash) <= t.MAX_MEDIA_HASH:
            reason = f"hash must have 1 to {t.MAX_MEDIA_HASH} characters"
        elif not before < item.offset < item.offset + item.length <= prompt_tokens:
            placed = f"{item.offset}+{item.length}"
            reason = f"placeholder tokens {placed} are not in the prompt, or not in order"
        elif len(item.is_embed) not in (0, -(-item.length // 8)):
            reason = f"is_embed has {len(item.is_embed)} bytes for {item.length} tokens"
        elif len(item.metadata) > t.MAX_MEDIA_METADATA:
            reason = f"metadata has more than {t.MAX_MEDIA_METADATA} bytes"
        if reason:
            raise InvalidRequest(f"media[{index}]: {reason}", field=f"media[{index}]")
        before = item.offset
    return tuple(map(_media_from_pb, messages))


def error_to_pb(error: PdserveError | ErrorInfo) -> c.Error:
    return _error_to_pb(cast("ErrorInfo", error))  # both have the same fields


def delta_from_pb(message: w.StreamDelta) -> t.StreamDelta:
    # Written out, because a router reads two for each request, and a codec takes twice as long.
    logprobs = logprobs_from_pb(message.logprobs)
    delta = t.StreamDelta(message.stream_id, tuple(message.token_ids), message.text, logprobs)
    delta.prompt_logprobs = logprobs_from_pb(message.prompt_logprobs)
    if message.HasField("routed_experts"):
        delta.routed_experts = experts_from_pb(message.routed_experts)
    if message.finish_reason:  # only the last delta has the other fields
        delta.finish_reason = finish_from_pb(message.finish_reason)
        if message.HasField("stop_reason"):
            delta.stop_reason = stop_reason_from_pb(message.stop_reason)
        if message.HasField("report"):
            delta.report = _report_from_pb(message.report)
        if message.HasField("error"):
            delta.error = error_from_pb(message.error)
        delta.exported_tokens, delta.embedding = message.exported_tokens, message.embedding
    if message.HasField("weights_switch"):
        delta.weights_switch = _switch_from_pb(message.weights_switch)
    return delta


def is_plain(delta: t.StreamDelta) -> bool:
    """Return True if the delta is one token of a stream that continues: the common case."""
    has_more = delta.logprobs or delta.prompt_logprobs or delta.routed_experts
    return delta.finish_reason is None and len(delta.token_ids) == 1 and not has_more


def plain_to_pb(rows: list[tuple[int, int, str]]) -> w.PlainTokens:
    """Return the message of plain deltas, given as (stream id, token id, text)."""
    stream_ids, token_ids, texts = zip(*rows, strict=True)
    return w.PlainTokens(stream_ids=stream_ids, token_ids=token_ids, texts=texts)


def moments_from_pb(message: w.StepMoments) -> StepMoments:
    """Return the moments in `message`. Raises InvalidRequest if they cannot be sums over steps."""
    moments = _moments_from_pb(message)
    for name in ("prefill", "decode"):
        if not getattr(moments, name).is_sound:
            raise InvalidRequest(f"steps.{name} has no sums over steps", field=f"steps.{name}")
    return moments


def recent_steps_to_pb(steps: Sequence[Step], now: float) -> w.RecentSteps:
    return w.RecentSteps(
        age_s=[now - step.ended_at for step in steps],
        took_s=[step.took_s for step in steps],
        prefill_tokens=[step.prefill_tokens for step in steps],
        decode_reqs=[step.decode_reqs for step in steps],
    )


def ledger_to_pb(ledger: t.KvLedger) -> w.KvLedger:
    message = _ledger_to_pb(ledger)
    message.pinned_blocks = ledger.pinned_blocks
    return message


kv_report_to_pb, _kv_report_from_pb = _codec(
    t.KvReport,
    w.KvReport,
    ledger=(ledger_to_pb, ledger_from_pb),
    links=_MAP,
    totals=_MAP,
    downgrades=_MAP,
)


def _check_amounts(amounts: Mapping[str, float], field: str) -> None:
    for name, value in amounts.items():
        if not is_name(name) or not 0 <= value < math.inf:
            raise InvalidRequest(f"{field}: {name[:64]!r} is not a count", field=field)


def kv_report_from_pb(message: w.KvReport) -> t.KvReport:
    """Return the report in `message`. Raises InvalidRequest for totals below 0 and for invalid
    metric names."""
    report = _kv_report_from_pb(message)
    _check_amounts(report.totals, "kv.totals")
    return report


account_to_pb, _account_from_pb = _codec(t.Account, w.Account, seconds=_MAP, energy_j=_MAP)


def account_from_pb(message: w.Account) -> t.Account:
    """Return the account in `message`. Raises InvalidRequest for amounts below 0 and for kinds that
    are invalid label values."""
    account = _account_from_pb(message)
    _check_amounts({"open_s": account.open_s, "busy_s": account.busy_s}, "account")
    _check_amounts(account.seconds, "account.seconds")
    _check_amounts(account.energy_j, "account.energy_j")
    return account


def stages_to_pb(stages: Iterable[Iterable[int]]) -> list[w.StageLayers]:
    return [w.StageLayers(layers=layers) for layers in stages]


def stages_from_pb(messages: Iterable[w.StageLayers]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(message.layers) for message in messages)


_write_kv, _read_kv = _codec(
    t.KvEndpoint,
    w.KvEndpoint,
    addresses=_TUPLE,
    layout=_MAP,
    transports=_TUPLE,
    stage_layers=(stages_to_pb, stages_from_pb),
)
# Routers of version 0.1 require a value. Its workers with vLLM's NIXL connector send another one.
_HANDOFF = "concurrent"


def _kv_to_pb(value: t.KvEndpoint) -> w.KvEndpoint:
    message = _write_kv(value)
    message.handoff = _HANDOFF
    return message


model_to_pb, model_from_pb = _MODEL = _codec(
    t.ModelInfo, w.ModelInfo, aliases=_TUPLE, sampling_defaults=_MAP, modalities=_MAP
)
worker_to_pb, _worker_from_pb = _codec(
    t.WorkerInfo,
    w.WorkerInfo,
    optional=("kv",),
    role=(role_to_pb, role_from_pb),
    model=_MODEL,
    kv=(_kv_to_pb, _read_kv),
    limits=_codec(t.EngineLimits, w.EngineLimits),
    gpus=_TUPLE,
    settings=_MAP,
    unsupported_fields=_TUPLE,
    topology=_MAP,
)
_REQUIRED = (
    *("worker_id", "instance_id", "address", "block_size", "total_blocks"),
    *("limits.max_num_seqs", "model.name", "model.max_model_len", "model.vocab_size"),
)


def worker_from_pb(message: w.WorkerInfo) -> t.WorkerInfo:
    """Return the registration in `message`. Raises InvalidRequest if a field that routing needs is
    missing or invalid."""
    for name in _REQUIRED:
        if not attrgetter(name)(message):
            raise InvalidRequest(f"worker.{name} is missing", field=f"worker.{name}")
    if message.HasField("kv"):
        if not message.kv.addresses:
            raise InvalidRequest("worker.kv.addresses is missing", field="worker.kv.addresses")
        if message.kv.handoff not in ("", _HANDOFF):
            reason = f"worker.kv.handoff {message.kv.handoff!r} is not supported: update the worker"
            raise InvalidRequest(reason, field="worker.kv.handoff")
    try:
        t.SamplingParams(**message.model.sampling_defaults)  # type: ignore[arg-type]
    except (InvalidRequest, TypeError) as error:
        key = "worker.model.sampling_defaults"
        raise InvalidRequest(f"{key}: {error}", field=key) from error
    return _worker_from_pb(message)


# Sampling parameters. An unset field of the message means vLLM's default.

_SAMPLING = t.SamplingParams.__slots__
_sampling_of = attrgetter(*_SAMPLING)
_DEFAULTS = _sampling_of(t.SamplingParams())


def structured_to_pb(value: t.StructuredOutput) -> c.StructuredOutput:
    if value.kind is t.Constraint.CHOICE:
        return c.StructuredOutput(choice=c.StructuredOutput.Choices(value=value.choices))
    given = True if value.kind is t.Constraint.JSON_OBJECT else value.value
    return c.StructuredOutput(**cast("dict[str, Any]", {value.kind.value: given}))


def structured_from_pb(message: c.StructuredOutput) -> t.StructuredOutput:
    kind = message.WhichOneof("constraint")
    if kind is None or (kind == "json_object" and not message.json_object):
        raise InvalidRequest("structured_output needs a constraint", field="structured_output")
    if kind == "choice":
        return t.StructuredOutput(t.Constraint.CHOICE, choices=tuple(message.choice.value))
    value = "" if kind == "json_object" else getattr(message, kind)
    return t.StructuredOutput(t.Constraint(kind), value)


_SAMPLING_FROM_PB: dict[str, Callable[[Any], Any]] = {
    "stop": tuple,
    "stop_token_ids": tuple,
    "logit_bias": dict,
    "structured_output": structured_from_pb,
}


def sampling_to_pb(params: t.SamplingParams) -> c.SamplingParams:
    """Return the message of `params` without default values, because most requests set few
    fields."""
    values = _sampling_of(params)
    is_set = map(ne, values, _DEFAULTS)
    given: dict[str, Any] = dict(compress(zip(_SAMPLING, values, strict=True), is_set))
    if params.structured_output is not None:
        given["structured_output"] = structured_to_pb(params.structured_output)
    given["max_tokens"] = params.max_tokens
    return c.SamplingParams(**given)


def sampling_from_pb(message: c.SamplingParams, *, default_max_tokens: int) -> t.SamplingParams:
    values: dict[str, Any] = {"max_tokens": default_max_tokens}
    for field, value in message.ListFields():
        if isinstance(value, float) and not math.isfinite(value):
            raise InvalidRequest(f"{field.name} must be a finite number", field=field.name)
        convert = _SAMPLING_FROM_PB.get(field.name)
        values[field.name] = value if convert is None else convert(value)
    return t.SamplingParams(**values)
