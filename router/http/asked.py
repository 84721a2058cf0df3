"""A request after reading: what goes to the router, and how the answer is to look."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from router.http.reading import Fields, refuse

if TYPE_CHECKING:
    from router.intake import Ask


@dataclass(frozen=True, slots=True)
class Streaming:
    """Whether the answer is streamed, and whether a chunk with the usage ends it."""

    enabled: bool
    include_usage: bool


@dataclass(frozen=True, slots=True)
class Asked:
    """`ask` for the intake, `streaming` for the way back."""

    ask: Ask
    streaming: Streaming


def read_model(fields: Fields) -> str:
    model = fields.string("model")
    if not model:
        refuse("model", "is needed")
    return model


def read_streaming(fields: Fields) -> Streaming:
    """Raises InvalidRequest for stream options without a stream, as OpenAI does."""
    enabled = fields.boolean("stream") or False
    options = fields.section("stream_options")
    if options is None:
        return Streaming(enabled, include_usage=False)
    if not enabled:
        refuse("stream_options", "is only for stream: true")
    options.allow(("include_usage", "include_obfuscation"))
    if options.boolean("include_obfuscation"):
        refuse(options.path("include_obfuscation"), "is not supported")
    return Streaming(enabled, include_usage=options.boolean("include_usage") or False)
