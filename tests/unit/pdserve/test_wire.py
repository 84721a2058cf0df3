"""What goes onto the wire comes off it unchanged, and bad messages are refused by name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve import types as t
from pdserve import wire
from pdserve.errors import InvalidRequest
from pdserve.v1 import common_pb2 as c
from pdserve.v1 import worker_pb2 as w

if TYPE_CHECKING:
    from google.protobuf.message import Message

    M = TypeVar("M", bound=Message)

COUNT = st.integers(1, (1 << 31) - 1)
TEXT = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)
TOKENS = st.lists(COUNT, max_size=5).map(tuple)
PLAIN = {int: COUNT, float: st.floats(0, 1e9), str: TEXT, bytes: st.binary(max_size=8)}


def made(hint: Any) -> st.SearchStrategy[Any]:
    """Draw values of a type of `pdserve.types`, with numbers that a message can hold."""
    args = [x for x in get_args(hint) if x is not type(None)]
    if hint in PLAIN:
        return PLAIN[hint]
    if names := getattr(hint, "__match_args__", ()):  # of a dataclass or a Struct
        hints = get_type_hints(hint, localns={"Mapping": Mapping})
        return st.builds(hint, **{name: made(hints[name]) for name in names})
    if get_origin(hint) is tuple:
        return st.lists(made(args[0]), min_size=1, max_size=3).map(tuple)
    if get_origin(hint) is Mapping:
        return st.dictionaries(made(args[0]), made(args[1]), max_size=3)
    if args:
        return st.none() | st.one_of(*map(made, args))
    return st.sampled_from(hint) if issubclass(hint, Enum) else st.from_type(hint)


def texts(**bounds: int) -> st.SearchStrategy[tuple[str, ...]]:
    return st.lists(TEXT, **bounds).map(tuple)  # type: ignore[arg-type]


STRUCTURED = st.one_of(
    st.builds(
        t.StructuredOutput,
        st.sampled_from([t.Constraint.JSON_SCHEMA, t.Constraint.REGEX, t.Constraint.GRAMMAR]),
        TEXT,
    ),
    st.just(t.StructuredOutput(t.Constraint.JSON_OBJECT)),
    st.builds(t.StructuredOutput, st.just(t.Constraint.CHOICE), choices=texts(max_size=3)),
)
ONE_ANSWER = st.builds(
    t.SamplingParams,
    max_tokens=st.integers(100, 1 << 30),
    temperature=st.floats(0, 100),
    top_p=st.floats(0.01, 1),
    top_k=st.integers(-1, 1 << 30),
    min_p=st.floats(0, 1),
    seed=st.none() | st.integers(-(1 << 63), (1 << 63) - 1),
    min_tokens=st.integers(0, 100),
    stop=texts(max_size=t.MAX_STOP_STRINGS),
    stop_token_ids=TOKENS,
    include_stop_str_in_output=st.booleans(),
    ignore_eos=st.booleans(),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    repetition_penalty=st.floats(0.01, 100),
    logprobs=st.none() | st.integers(0, t.MAX_LOGPROBS),
    logit_bias=st.dictionaries(COUNT, st.floats(-100, 100), max_size=3),
    structured_output=st.none() | STRUCTURED,
    skip_special_tokens=st.booleans(),
)
# Each answer of several has a seed of its own, counted from the first one's.
SAMPLING = ONE_ANSWER | st.builds(
    lambda one, n, seed: replace(one, n=n, seed=seed),
    ONE_ANSWER,
    st.integers(2, 128),
    st.none() | st.integers(0, t.MAX_SEED - 128),
)
# Only the last delta of a stream has more than tokens.
DELTA = made(t.StreamDelta).map(
    lambda x: (
        x
        if x.finish_reason
        else t.StreamDelta(
            x.stream_id, x.token_ids, x.text, x.logprobs, weights_switch=x.weights_switch
        )
    )
)


def travelled(message: M) -> M:
    """Return the message as received."""
    return type(message).FromString(message.SerializeToString())


SAMPLED = {"temperature": 0.6, "top_k": 20.0}
WORKER = made(t.WorkerInfo).map(
    lambda x: replace(x, model=replace(x.model, sampling_defaults=SAMPLED))
)
REPORT = made(t.KvReport).map(lambda x: replace(x, totals={"pushed_bytes": 1e12, "push_s": 0.5}))
FUNCTIONS: list[tuple[st.SearchStrategy[Any], Any, Any]] = [
    (SAMPLING, wire.sampling_to_pb, partial(wire.sampling_from_pb, default_max_tokens=1)),
    (DELTA, wire.delta_to_pb, wire.delta_from_pb),
    (WORKER, wire.worker_to_pb, wire.worker_from_pb),
    (made(t.WorkerLoad), wire.load_to_pb, wire.load_from_pb),
    (made(t.KvLedger), wire.ledger_to_pb, wire.ledger_from_pb),
    (REPORT, wire.kv_report_to_pb, wire.kv_report_from_pb),
    (made(t.Usage), wire.usage_to_pb, wire.usage_from_pb),
    (made(t.Receipt), wire.receipt_to_pb, wire.receipt_from_pb),
    (made(t.ErrorInfo), wire.error_to_pb, wire.error_from_pb),
]


@pytest.mark.parametrize(("values", "to_pb", "from_pb"), FUNCTIONS)
@given(data=st.data())
def test_every_type_survives_the_wire(
    data: st.DataObject, values: st.SearchStrategy[Any], to_pb: Any, from_pb: Any
) -> None:
    value = data.draw(values)
    assert from_pb(travelled(to_pb(value))) == value


def test_unset_sampling_is_the_defaults_but_for_the_length() -> None:
    made = wire.sampling_from_pb(c.SamplingParams(), default_max_tokens=7)
    assert made == t.SamplingParams(max_tokens=7)


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (c.SamplingParams(temperature=math.nan), "temperature"),
        (c.SamplingParams(top_p=math.inf), "top_p"),
        (c.SamplingParams(repetition_penalty=math.inf), "repetition_penalty"),
        (c.SamplingParams(logit_bias={1: math.nan}), "logit_bias"),
        (c.SamplingParams(structured_output=c.StructuredOutput()), "structured_output"),
        (
            c.SamplingParams(structured_output=c.StructuredOutput(json_object=False)),
            "structured_output",
        ),
    ],
)
def test_bad_sampling_is_refused_by_name(message: c.SamplingParams, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        wire.sampling_from_pb(message, default_max_tokens=16)
    assert caught.value.field == field


def complete_worker(**changes: Any) -> w.WorkerInfo:
    message = w.WorkerInfo(
        worker_id="w",
        instance_id="1",
        role=w.ROLE_DECODE,
        model=w.ModelInfo(name="m", max_model_len=8, vocab_size=8),
        address="h:1",
        block_size=1,
        total_blocks=1,
        limits=w.EngineLimits(max_num_seqs=1),
    )
    message.MergeFrom(w.WorkerInfo(**changes))
    return message


def test_a_kv_endpoint_without_an_address_is_refused() -> None:
    with pytest.raises(InvalidRequest) as caught:
        wire.worker_from_pb(complete_worker(kv=w.KvEndpoint(compatibility="c")))
    assert caught.value.field == "worker.kv.addresses"


def test_workers_of_version_0_1_that_compute_both_phases_in_turn_are_refused_by_name() -> None:
    known = w.KvEndpoint(addresses=["h:1"], compatibility="c", handoff="concurrent")
    info = wire.worker_from_pb(complete_worker(kv=known))
    assert wire.worker_to_pb(info).kv.handoff == "concurrent", "routers of 0.1 require it"
    known.handoff = "sequential"
    with pytest.raises(InvalidRequest, match="'sequential' is not supported") as caught:
        wire.worker_from_pb(complete_worker(kv=known))
    assert caught.value.field == "worker.kv.handoff"


@pytest.mark.parametrize("defaults", [{"top_p": 2.0}, {"heat": 1.0}])
def test_sampling_defaults_that_no_request_may_have_are_refused(defaults: dict[str, float]) -> None:
    model = w.ModelInfo(sampling_defaults=defaults)
    with pytest.raises(InvalidRequest) as caught:
        wire.worker_from_pb(complete_worker(model=model))
    assert caught.value.field == "worker.model.sampling_defaults"


@pytest.mark.parametrize(
    "name",
    ["worker_id", "instance_id", "address", "block_size", "total_blocks", "limits", "model"],
)
def test_incomplete_worker_is_refused_by_name(name: str) -> None:
    message = complete_worker()
    wire.worker_from_pb(message)
    message.ClearField(name)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest) as caught:
        wire.worker_from_pb(message)
    assert caught.value.field.startswith(f"worker.{name}")


@pytest.mark.parametrize(
    ("name", "value"),
    [("Bytes", 1.0), ("a b", 1.0), ("", 1.0), ("x" * 65, 1.0), ("a", -1.0), ("a", math.nan)],
)
def test_a_total_that_no_metric_can_have_is_refused(name: str, value: float) -> None:
    with pytest.raises(InvalidRequest) as caught:
        wire.kv_report_from_pb(w.KvReport(totals={name: value}))
    assert caught.value.field == "kv.totals"


@pytest.mark.parametrize("role", [0, 99])
def test_unknown_role_is_refused(role: int) -> None:
    message = complete_worker()
    message.role = role  # type: ignore[assignment]
    with pytest.raises(InvalidRequest) as caught:
        wire.worker_from_pb(message)
    assert caught.value.field == "role"


def test_unknown_finish_reason_is_refused() -> None:
    with pytest.raises(InvalidRequest):
        wire.delta_from_pb(w.StreamDelta(finish_reason=99))  # type: ignore[arg-type]


IMAGE = t.MediaItem(
    "image", "a1", offset=2, length=9, is_embed=b"\xff\x01", metadata=b"m", data=b"d"
)


def test_media_survive_the_wire() -> None:
    assert wire.media_from_pb([wire.media_to_pb(IMAGE)], 11) == (IMAGE,)


@pytest.mark.parametrize(
    "change",
    [
        {"modality": "video"},
        {"hash": ""},
        {"hash": "a" * 129},
        {"offset": 3},
        {"offset": 0},
        {"length": 0},
        {"is_embed": b"\xff"},
        {"metadata": bytes(2049)},
    ],
)
def test_a_bad_media_item_is_refused_by_its_index(change: dict[str, Any]) -> None:
    before = t.MediaItem("image", "b2", offset=0, length=2)
    items = [before, replace(IMAGE, **change)]
    with pytest.raises(InvalidRequest) as caught:
        wire.media_from_pb([wire.media_to_pb(item) for item in items], 11)
    assert caught.value.field == "media[1]"
