"""Generates `docs/grpc.md`: services, messages and enums of the gRPC API, from the protos and their
comments."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorSet

if TYPE_CHECKING:
    from collections.abc import Sequence

    from google.protobuf.descriptor_pb2 import DescriptorProto, EnumDescriptorProto

# Comments by path: field numbers of descriptor.proto, and indices.
_Comments: TypeAlias = dict[tuple[int, ...], str]

_ROOT = Path(__file__).resolve().parents[2]
_PROTOS = _ROOT / "protos"
# The API of clients and administrators. worker.proto and parser.proto are between our processes.
_FILES = tuple(f"pdserve/v1/{name}.proto" for name in ("generation", "admin", "common"))
_PACKAGE = ".pdserve.v1."
# Field numbers in FileDescriptorProto, then in the descriptors of services, messages, enums.
_MESSAGE, _ENUM, _SERVICE = 4, 5, 6
_METHOD, _FIELD, _NESTED, _VALUE = 2, 2, 3, 2

_INTRO = """# gRPC API

Generated from `protos/pdserve/v1/` by `make docs`. `pdserve.client` is a Python client of
`Generation`. Types without a link are in `protos/pdserve/v1/worker.proto`.

An API key goes into the metadata: `authorization: Bearer KEY`. Errors are of type [Error](#error).
"""


def as_markdown() -> str:
    """Return the document. Runs protoc of the package grpcio-tools."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "descriptors"
        options = (f"-I{_PROTOS}", "--include_source_info", f"--descriptor_set_out={target}")
        subprocess.run([sys.executable, "-m", "grpc_tools.protoc", *options, *_FILES], check=True)
        found = FileDescriptorSet.FromString(target.read_bytes())
    by_name = {file.name: file for file in found.file}
    files = [by_name[name] for name in _FILES]
    names = {x.name for file in files for x in file.message_type}
    names |= {x.name for file in files for x in file.enum_type}
    services, types = "", "\n## Messages and enums\n"
    for file in files:
        comments: _Comments = {
            tuple(x.path): " ".join(f"{x.leading_comments} {x.trailing_comments}".split())
            for x in file.source_code_info.location
        }
        for i, service in enumerate(file.service):
            rows = [
                (
                    f"`{method.name}`",
                    _linked(method.input_type, names),
                    ("stream of " if method.server_streaming else "")
                    + _linked(method.output_type, names),
                    comments.get((_SERVICE, i, _METHOD, j), ""),
                )
                for j, method in enumerate(service.method)
            ]
            services += f"\n## Service {service.name}\n{_text(comments, (_SERVICE, i))}"
            services += _table(("call", "takes", "returns", ""), rows)
        for i, message in enumerate(file.message_type):
            types += _message(message, (_MESSAGE, i), comments, names)
        for i, enum in enumerate(file.enum_type):
            types += _enum(enum, (_ENUM, i), comments)
    return _INTRO + services + types


def _message(
    message: DescriptorProto,
    path: tuple[int, ...],
    comments: _Comments,
    names: set[str],
    outer: str = "",
) -> str:
    name, maps, rows, nested = outer + message.name, {}, [], ""
    for i, inner in enumerate(message.nested_type):
        if inner.options.map_entry:
            maps[f"{_PACKAGE}{name}.{inner.name}"] = inner
        else:
            names.add(f"{name}.{inner.name}")
            nested += _message(inner, (*path, _NESTED, i), comments, names, f"{name}.")
    for i, field in enumerate(message.field):
        entry = maps.get(field.type_name)
        if entry is not None:
            key, value = (_type(x, names) for x in entry.field)
            kind = f"map of {key} to {value}"
        else:
            is_repeated = field.label == FieldDescriptorProto.LABEL_REPEATED
            kind = ("repeated " if is_repeated else "") + _type(field, names)
        note = comments.get((*path, _FIELD, i), "")
        if field.proto3_optional:
            kind = f"optional {kind}"
        elif field.HasField("oneof_index"):
            oneof = message.oneof_decl[field.oneof_index].name
            note = f"One of `{oneof}`. {note}".strip()
        rows.append((f"`{field.name}`", kind, note))
    table = _table(("field", "type", ""), rows) if rows else "\nNo fields.\n"
    return f"\n### {name}\n{_text(comments, path)}{table}{nested}"


def _enum(enum: EnumDescriptorProto, path: tuple[int, ...], comments: _Comments) -> str:
    rows = [
        (f"`{x.name}`", str(x.number), comments.get((*path, _VALUE, i), ""))
        for i, x in enumerate(enum.value)
    ]
    return f"\n### {enum.name}\n{_text(comments, path)}{_table(('value', 'number', ''), rows)}"


def _text(comments: _Comments, path: tuple[int, ...]) -> str:
    return f"\n{comments[path]}\n" if comments.get(path) else ""


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n" + "".join("| " + " | ".join(line) + " |\n" for line in lines)


def _type(field: FieldDescriptorProto, names: set[str]) -> str:
    if field.type_name:
        return _linked(field.type_name, names)
    return FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()


def _linked(type_name: str, names: set[str]) -> str:
    name = type_name.removeprefix(_PACKAGE)
    anchor = re.sub(r"\W", "", name).lower()
    return f"[{name}](#{anchor})" if name in names else f"`{name}`"


if __name__ == "__main__":
    (_ROOT / "docs" / "grpc.md").write_text(as_markdown(), encoding="utf-8")
