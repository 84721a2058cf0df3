"""Valid and invalid messages of our own protos to a whole service: no internal error, no crash."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.types import SamplingParams
from pdserve.v1 import admin_pb2, generation_pb2, worker_pb2
from tests.support.cluster import Cluster
from tests.support.timeouts import WAIT_S

if TYPE_CHECKING:
    from google.protobuf.descriptor import Descriptor, FieldDescriptor

WORKER = worker_pb2.DESCRIPTOR.services_by_name["Worker"]
# What changes a worker's standing.
CONTROL = ("Drain", "Undrain", "SetRole", "SettleRole")
BROKEN = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)


def messages(kind: Any, depth: int = 3) -> st.SearchStrategy[Any]:
    """Draw messages of a generated class with some of its fields."""
    fields = {x.name: x for x in kind.DESCRIPTOR.fields if depth or x.message_type is None}
    values = {name: _field(kind, x, depth) for name, x in fields.items()}
    return st.fixed_dictionaries({}, optional=values).map(lambda found: _made(kind, found))


def _made(kind: Any, values: dict[str, Any]) -> Any:
    seen: set[str] = set()
    kept: dict[str, Any] = {}
    for name, value in values.items():
        oneof = kind.DESCRIPTOR.fields_by_name[name].containing_oneof
        if oneof is None or oneof.name not in seen:
            kept[name] = value
            seen |= {oneof.name} if oneof is not None else set()
    return kind(**kept)


def _field(kind: Any, field: FieldDescriptor, depth: int) -> st.SearchStrategy[Any]:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        key, value = field.message_type.fields
        return st.dictionaries(_scalar(key), _scalar(value), max_size=2)
    one = _scalar(field) if field.message_type is None else _nested(field.message_type, depth)
    return st.lists(one, max_size=2) if field.is_repeated else one


def _nested(descriptor: Descriptor, depth: int) -> st.SearchStrategy[Any]:
    return messages(descriptor._concrete_class, depth - 1)


def _scalar(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    match field.cpp_type:
        case field.CPPTYPE_STRING:
            is_bytes = field.type == field.TYPE_BYTES
            return st.binary(max_size=8) if is_bytes else st.text(max_size=8)
        case field.CPPTYPE_BOOL:
            return st.booleans()
        case field.CPPTYPE_DOUBLE | field.CPPTYPE_FLOAT:
            return st.floats(width=32)
        case field.CPPTYPE_INT32:
            return st.integers(-(1 << 31), (1 << 31) - 1)
        case field.CPPTYPE_INT64:
            return st.integers(-(1 << 63), (1 << 63) - 1)
        case field.CPPTYPE_ENUM:
            return st.integers(0, 9)
        case _:
            return st.integers(0, (1 << 32) - 1)


def fuzz_grpc(router: str, worker: str) -> None:
    with grpc.insecure_channel(router) as one, grpc.insecure_channel(worker) as other:
        for channel, service in (
            (one, generation_pb2.DESCRIPTOR.services_by_name["Generation"]),
            (one, worker_pb2.DESCRIPTOR.services_by_name["Registry"]),
            (one, admin_pb2.DESCRIPTOR.services_by_name["Admin"]),
            (other, WORKER),
        ):
            for method in service.methods:
                # A worker that is told to drain by chance has done what it was told.
                if method.name not in CONTROL:
                    fuzz_method(channel, f"/{service.full_name}/{method.name}", method)


def fuzz_method(channel: grpc.Channel, path: str, method: Any) -> None:
    kind = method.input_type._concrete_class
    streams = method.client_streaming
    call: Any = (channel.stream_stream if streams else channel.unary_stream)(
        path, request_serializer=kind.SerializeToString
    )

    @settings(max_examples=15)
    @given(messages(kind))
    def structured(message: Any) -> None:
        code = code_of(call(iter([message]) if streams else message, timeout=WAIT_S))
        assert code not in BROKEN, (code, message)

    structured()


def code_of(running: Any) -> grpc.StatusCode:
    """Return the first message of an RPC, or its status."""
    try:
        next(running, None)
    except grpc.RpcError:
        code: grpc.StatusCode = running.code()
        return code
    finally:
        running.cancel()
    return grpc.StatusCode.OK


async def test_nothing_that_is_sent_is_an_internal_error_or_a_crash() -> None:
    async with Cluster(aggregated=1) as cluster:
        worker = cluster.workers["aggregated-0"].info.address
        await asyncio.to_thread(fuzz_grpc, cluster.grpc, worker)
        answer = await cluster.ask([1, 2, 3], SamplingParams(max_tokens=4, ignore_eos=True))
        assert len(answer.token_ids) == 4
