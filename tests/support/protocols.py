"""The protocols of a version, kept for the tests of later ones.

`python -m tests.support.protocols` writes those of this version into tests/data.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import msgspec
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorSet

from kv_transfer.protocol.messages import PROTOCOL_VERSION, KvMessage
from kv_transfer.transport.nccl import messages as nccl_messages
from pdserve import __version__
from pdserve.v1 import (
    admin_pb2,
    common_pb2,
    generation_pb2,
    parser_pb2,
    peer_pb2,
    worker_pb2,
)
from tests.support.commands import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from google.protobuf.descriptor_pb2 import DescriptorProto, EnumDescriptorProto

DATA = ROOT / "tests/data"
_FILES = (common_pb2, admin_pb2, generation_pb2, parser_pb2, peer_pb2, worker_pb2)
_TRANSPORTS = (nccl_messages,)  # those that define messages of their own


def protos_path(version: str) -> Path:
    return DATA / f"protos-{version}.binpb"


def kv_messages_path(version: str) -> Path:
    return DATA / f"kv-messages-{version}.json"


def protos() -> FileDescriptorSet:
    """Return the descriptors of protos/ without comments."""
    found = FileDescriptorSet()
    for module in _FILES:
        module.DESCRIPTOR.CopyToProto(found.file.add())
    return found


def kv_messages() -> dict[str, Any]:
    """Return PROTOCOL_VERSION and the schema of each message between workers."""
    modules = {KvMessage.__module__, *(x.__name__ for x in _TRANSPORTS)}
    kinds = [x for x in KvMessage.__subclasses__() if x.__module__ in modules]
    _, schemas = msgspec.json.schema_components(kinds)
    described = {"title", "description"}
    plain = {
        name: {k: v for k, v in x.items() if k not in described} for name, x in schemas.items()
    }
    return {"PROTOCOL_VERSION": PROTOCOL_VERSION, "messages": plain}


def incompatibilities(before: FileDescriptorSet, after: FileDescriptorSet) -> list[str]:
    """Return what keeps programs with these two sets of protos from working together.

    Names of fields, and what `after` adds, do not matter. A field or enum value may be removed if
    its number is reserved. A number that is reserved must not be used again.
    """
    messages, enums, methods = _by_name(after)
    old_messages, old_enums, old_methods = _by_name(before)
    found = []
    for name, old in old_messages.items():
        if name in messages:  # a field of a removed message has another type now, or none
            found += [f"{name} {x}" for x in _changed_fields(old, messages[name])]
    for name, old_enum in old_enums.items():
        if name in enums:
            found += [f"{name} {x}" for x in _missing_values(old_enum, enums[name])]
    for name, signature in old_methods.items():
        if methods.get(name) != signature:
            found.append(f"{name}: {signature}, now {methods.get(name, 'missing')}")
    return found


def _changed_fields(old: DescriptorProto, new: DescriptorProto) -> Iterator[str]:
    now = {x.number: _shape(new, x) for x in new.field}
    for field in old.field:
        shape = _shape(old, field)
        if field.number not in now:
            if not any(x.start <= field.number < x.end for x in new.reserved_range):
                yield f"{field.number}: {shape}, now neither there nor reserved"
        elif now[field.number] != shape:
            yield f"{field.number}: {shape}, now {now[field.number]}"
    for number, shape in now.items():
        if any(x.start <= number < x.end for x in old.reserved_range):
            yield f"{number}: reserved, now {shape}"


def _missing_values(old: EnumDescriptorProto, new: EnumDescriptorProto) -> Iterator[str]:
    now = {x.number for x in new.value}
    for value in old.value:
        is_reserved = any(x.start <= value.number <= x.end for x in new.reserved_range)
        if value.number not in now and not is_reserved:
            yield f"{value.number}: {value.name}, now neither there nor reserved"


def _shape(message: DescriptorProto, field: FieldDescriptorProto) -> str:
    """Return what decides how a field is read."""
    kind = FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
    words = [field.type_name or kind]
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        words.insert(0, "repeated")
    if field.HasField("oneof_index") and not field.proto3_optional:
        words.append(f"of {message.oneof_decl[field.oneof_index].name}")
    return " ".join(words)


def _by_name(
    files: FileDescriptorSet,
) -> tuple[dict[str, DescriptorProto], dict[str, EnumDescriptorProto], dict[str, str]]:
    """Return all messages, all enums, and the signatures of all methods."""
    messages: dict[str, DescriptorProto] = {}
    enums: dict[str, EnumDescriptorProto] = {}
    methods: dict[str, str] = {}

    def add(scope: str, inside: DescriptorProto) -> None:
        messages[scope] = inside
        enums.update((f"{scope}.{x.name}", x) for x in inside.enum_type)
        for each in inside.nested_type:
            add(f"{scope}.{each.name}", each)

    for file in files.file:
        enums.update((f"{file.package}.{x.name}", x) for x in file.enum_type)
        for message in file.message_type:
            add(f"{file.package}.{message.name}", message)
        for service in file.service:
            for rpc in service.method:
                sent = "stream " * rpc.client_streaming + rpc.input_type
                answered = "stream " * rpc.server_streaming + rpc.output_type
                methods[f"{file.package}.{service.name}.{rpc.name}"] = f"{sent} -> {answered}"
    return messages, enums, methods


if __name__ == "__main__":
    DATA.mkdir(exist_ok=True)
    protos_path(__version__).write_bytes(protos().SerializeToString(deterministic=True))
    written = json.dumps(kv_messages(), indent=1, sort_keys=True) + "\n"
    kv_messages_path(__version__).write_text(written, "utf-8")
