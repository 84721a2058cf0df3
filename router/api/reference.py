"""Generates `docs/api.md`: endpoints of the HTTP API and fields of their bodies, from structs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from router.api.openapi import openapi
from router.api.route_table import ROUTES
from router.dialects.fields import NO_EFFECT, encode

if TYPE_CHECKING:
    from collections.abc import Iterator

_INTRO = """# HTTP API

Generated from the code by `make docs`. The router serves the same as `/openapi.json` and as a page
at `/docs`.

The router honours a field as its row says, or refuses the request with a 400 that names the field.
A null field counts as not set. Errors have OpenAI's shape; on Anthropic's paths, Anthropic's.

With tenants configured, all endpoints above `/health` in the table need a key, as `Authorization:
Bearer KEY` or `x-api-key: KEY`. `X-Session-Id` names a
request's conversation ([scheduling](scheduling.md#sessions)). `X-Request-Id` names a request in
logs and in `pdserve explain`. A request with `Idempotency-Key` is answered once
([operations](operations.md#ask-again-without-paying-twice)). `X-Model-Override` names a model
of the [virtual model](model-tiers.md) that `model` names.

## Endpoints

| | | |
|---|---|---|
"""


# Larger limits are only the range of the protocol's integers, and not shown.
_UNBOUNDED = 1 << 30


def as_markdown() -> str:
    """Return the document."""
    api = openapi(ROUTES)
    schemas: dict[str, Any] = api["components"]["schemas"]
    text = _INTRO
    for route in ROUTES:
        if route.text:
            notes = ["also in batches"] if route.line else []
            if route.body is not None:
                notes.insert(0, f"[body](#{route.body.__name__.lower()})")
            text += f"| {route.method} `{route.path}` | {route.text} | {', '.join(notes)} |\n"
    names = [x.body.__name__ for x in ROUTES if x.body is not None]
    text += "\n## Bodies\n"
    for name in names:
        text += _table(name, schemas[name])
    text += "\n## Parts of bodies\n"
    for name in _reached(names, schemas):
        if name not in names:
            text += _table(name, schemas[name])
    return text


def _table(name: str, schema: dict[str, Any]) -> str:
    text = f"\n### {name}\n\n"
    if not schema.get("properties"):
        return text + f"Only `type`: {_values(schema)}\n" if schema.get("enum") else text
    text += f"{_one_line(schema.get('description', ''))}\n\n" if schema.get("description") else ""
    refused, ignored, rows = [], [], ""
    required = schema.get("required", ())
    for field, known in sorted(schema["properties"].items()):
        note = _one_line(known.get("description", ""))
        if note.startswith("Not supported"):
            values = _values(known)
            refused.append(f"`{field}`" + (f" ({values})" if values else ""))
        elif note == NO_EFFECT:
            ignored.append(f"`{field}`")
        else:
            is_required = "required. " if field in required else ""
            rows += f"| `{field}` | {_values(known)} | {is_required}{note} |\n"
    if rows:
        text += f"| honoured | values | |\n|---|---|---|\n{rows}"
    if ignored:
        text += f"\nAccepted without effect: {', '.join(ignored)}.\n"
    if refused:
        text += f"\nRefused by name, but for the values in brackets: {', '.join(refused)}.\n"
    return text


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _values(schema: dict[str, Any]) -> str:
    """Return the values that a field may have, except null."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "enum" in schema:
        values = [x for x in schema["enum"] if x is not None]
        return ", ".join(f"`{encode(x).decode()}`" for x in values)
    if "anyOf" in schema:
        kinds = [_values(x) for x in schema["anyOf"] if x.get("type") != "null"]
        return " or ".join(kinds)
    kind = schema.get("type", "anything")
    if kind == "array":
        items = _values(schema.get("items", {}))
        return f"list of ({items})" if " " in items else f"list of {items}"
    low, high = schema.get("minimum"), schema.get("maximum", _UNBOUNDED)
    if low is None and "exclusiveMinimum" in schema:
        kind, low = f"{kind} above", schema["exclusiveMinimum"]
    elif low is None or -low >= _UNBOUNDED:
        return str(kind)
    else:
        kind = f"{kind} from"
    return f"{kind} {low:g}" + (f" to {high:g}" if high < _UNBOUNDED else "")


def _reached(names: list[str], schemas: dict[str, Any]) -> list[str]:
    """Return `names`, then the names of all schemas that they refer to, breadth first."""
    found = dict.fromkeys(names)
    waiting = list(names)
    while waiting:
        for name in _references(schemas[waiting.pop(0)]):
            if name not in found:
                found[name] = None
                waiting.append(name)
    return list(found)


def _references(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        if "$ref" in schema:
            yield schema["$ref"].rpartition("/")[2]
        for value in schema.get("mapping", {}).values():
            yield value.rpartition("/")[2]
        for value in schema.values():
            yield from _references(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from _references(value)


if __name__ == "__main__":
    path = Path(__file__).resolve().parents[2] / "docs" / "api.md"
    path.write_text(as_markdown(), encoding="utf-8")
