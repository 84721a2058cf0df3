"""A request after reading: what goes to the router, and how the answer is to look."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdserve.errors import UnsupportedField
from pdserve.lean import lean
from pdserve.types import ServiceClass
from router.http.reading import Fields, as_token_ids, refuse

if TYPE_CHECKING:
    from router.intake import Ask


@lean
@dataclass(frozen=True, slots=True)
class Streaming:
    """Whether the answer is streamed, whether a chunk with the usage ends it, and whether it says
    token ids beside the text."""

    enabled: bool
    include_usage: bool
    token_ids: bool = False


@lean
@dataclass(frozen=True, slots=True)
class Asked:
    """`ask` for the intake, `streaming` for the way back."""

    ask: Ask
    streaming: Streaming


# OpenAI's tiers; its flex is slower and cheaper, for work that nobody waits for.
_SERVICE_TIERS = {
    None: ServiceClass.INTERACTIVE,
    "auto": ServiceClass.INTERACTIVE,
    "default": ServiceClass.INTERACTIVE,
    "flex": ServiceClass.BATCH,
}


def read_priority(fields: Fields) -> int:
    """vLLM's field, of 64 bits."""
    priority = fields.integer("priority") or 0
    if not -(1 << 63) <= priority < 1 << 63:
        refuse("priority", f"must fit 64 bits, not {priority}")
    return priority


def read_service_class(fields: Fields) -> ServiceClass:
    """Raises UnsupportedField for a tier that there is not."""
    tier = fields.string("service_tier")
    if tier not in _SERVICE_TIERS:
        known = ", ".join(name for name in _SERVICE_TIERS if name)
        raise UnsupportedField(
            f"service_tier must be one of {known}, not {tier!r}", field="service_tier"
        )
    return _SERVICE_TIERS[tier]


def read_model(fields: Fields) -> str:
    model = fields.string("model")
    if not model:
        refuse("model", "is needed")
    return model


def read_streaming(fields: Fields) -> Streaming:
    """Raises InvalidRequest for stream options without a stream, as OpenAI does."""
    enabled = fields.boolean("stream") or False
    token_ids = fields.boolean("return_token_ids") or False
    options = fields.section("stream_options")
    if options is None:
        return Streaming(enabled, include_usage=False, token_ids=token_ids)
    if not enabled:
        refuse("stream_options", "is only for stream: true")
    options.allow(("include_usage", "include_obfuscation"))
    if options.boolean("include_obfuscation"):
        refuse(options.path("include_obfuscation"), "is not supported")
    include_usage = options.boolean("include_usage") or False
    return Streaming(enabled, include_usage, token_ids)


def read_resume(fields: Fields) -> tuple[int, ...]:
    """Ours: the tokens of an answer that broke off."""
    name = "resume_token_ids"
    return as_token_ids(fields.array(name) or [], fields.path(name))
