"""This version works with the ones that were released before it, as docs/versions.md says."""

from __future__ import annotations

import json
import re

import pytest
from google.protobuf import text_format
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from packaging.version import Version

from tests.support.commands import ROOT
from tests.support.protocols import (
    DATA,
    incompatibilities,
    kv_messages,
    kv_messages_path,
    protos,
    protos_path,
)

RELEASED = """
file {
  package: "p"
  message_type {
    name: "M"
    field { name: "a" number: 1 label: LABEL_OPTIONAL type: TYPE_UINT32 }
    field { name: "b" number: 2 label: LABEL_OPTIONAL type: TYPE_STRING }
    reserved_range { start: 3 end: 4 }
  }
  enum_type { name: "E" value { name: "NONE" number: 0 } value { name: "ONE" number: 1 } }
  service { name: "S" method { name: "Get" input_type: ".p.M" output_type: ".p.M" } }
}
"""
FIELD_B = 'field { name: "b" number: 2 label: LABEL_OPTIONAL type: TYPE_STRING }'
VALUE_ONE = 'value { name: "ONE" number: 1 }'
METHOD = 'method { name: "Get" input_type: ".p.M" output_type: ".p.M" }'


def neighbours() -> list[str]:
    """Return the released versions of the newest minor version and of the one before it."""
    text = (ROOT / "CHANGELOG.md").read_text("utf-8")
    released = [Version(x) for x in re.findall(r"^## \[([\d.]+)\]", text, re.MULTILINE)]
    minors = sorted({x.release[:2] for x in released})[-2:]
    return [str(x) for x in released if x.release[:2] in minors]


def test_the_protocols_of_each_neighbouring_release_are_kept() -> None:
    """Of a new version: `make protocols` adds them. Remove those of versions that are no neighbours
    any more."""
    kept = {path for x in neighbours() for path in (protos_path(x), kv_messages_path(x))}
    assert set(DATA.iterdir()) == kept


@pytest.mark.parametrize("version", neighbours())
def test_routers_and_workers_work_with_those_of_a_release(version: str) -> None:
    released = FileDescriptorSet.FromString(protos_path(version).read_bytes())
    assert incompatibilities(released, protos()) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (FIELD_B, ""),
        (FIELD_B, FIELD_B.replace("2", "5")),
        (FIELD_B, FIELD_B.replace("STRING", "BYTES")),
        (FIELD_B, FIELD_B.replace("OPTIONAL", "REPEATED")),
        (FIELD_B, FIELD_B.replace("}", 'oneof_index: 0 } oneof_decl { name: "one" }')),
        (FIELD_B, FIELD_B + FIELD_B.replace("2", "3").replace('"b"', '"c"')),
        (VALUE_ONE, VALUE_ONE.replace("1", "2")),
        (METHOD, ""),
        (METHOD, METHOD.replace('".p.M" }', '".p.N" }')),
        (METHOD, METHOD.replace("}", "server_streaming: true }")),
    ],
)
def test_a_change_that_a_neighbour_misreads_is_found(old: str, new: str) -> None:
    before, after = RELEASED, RELEASED.replace(old, new)
    assert before != after
    assert len(incompatibilities(parsed(before), parsed(after))) == 1


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("", ""),
        (FIELD_B, FIELD_B.replace('"b"', '"renamed"')),
        (FIELD_B, FIELD_B + FIELD_B.replace("2", "5").replace('"b"', '"added"')),
        (FIELD_B, "reserved_range { start: 2 end: 3 }"),
        (VALUE_ONE, "reserved_range { start: 1 end: 1 }"),
        (METHOD, METHOD + METHOD.replace("Get", "Set")),
    ],
)
def test_a_change_that_a_neighbour_can_read_is_not(old: str, new: str) -> None:
    assert incompatibilities(parsed(RELEASED), parsed(RELEASED.replace(old, new))) == []


def parsed(text: str) -> FileDescriptorSet:
    return text_format.Parse(text, FileDescriptorSet())


@pytest.mark.parametrize("version", neighbours())
def test_kv_messages_that_differ_have_another_protocol_version(version: str) -> None:
    released, now = json.loads(kv_messages_path(version).read_text("utf-8")), kv_messages()
    if released["PROTOCOL_VERSION"] == now["PROTOCOL_VERSION"]:
        assert now["messages"] == released["messages"]
    else:
        assert now["PROTOCOL_VERSION"] > released["PROTOCOL_VERSION"]
