"""Decides whether two greedy answers differ by more than rounding."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.cli.verify.endpoint import TOP_LOGPROBS

if TYPE_CHECKING:
    from pdserve.cli.verify.endpoint import Endpoint, EndpointAnswer

# In nats. A batch of another shape, or a cached prefix, adds numbers in another order. Logits of
# about 20 have steps of 0.125 in bfloat16, and rounding moves each of two by one step at most.
TIE = 0.25


async def is_rounding(
    endpoint: Endpoint, one: EndpointAnswer, other: EndpointAnswer
) -> bool | None:
    """Return True if two different answers to one greedy request diverge where both tokens are
    about equally likely, else False. Return None if the endpoint returns no logprobs."""
    if not endpoint.has_logprobs:
        return None
    body = {**one.request, "stream": False, "logprobs": True, "top_logprobs": TOP_LOGPROBS}
    body.pop("stream_options", None)
    scored = await endpoint.send(body)
    if not scored.first.scores:
        return None
    return all(_is_tie(scored, answer) for answer in (one, other) if answer.text != scored.text)


def _is_tie(scored: EndpointAnswer, other: EndpointAnswer) -> bool:
    """Return True if `other` diverges from `scored` at a token whose logprob is within TIE."""
    parting, start = _parting(scored, other), 0
    for entry in scored.first.scores:
        token = entry["token"]
        if start + len(token) > parting or (not token and start >= parting):
            rest = other.text[start:]
            # The end of an answer is a token too, with a name such as <|im_end|> or none.
            is_end = not rest and other.first.finish_reason == "stop"
            return any(
                (near and rest.startswith(near)) or (is_end and near[:1] in ("", "<"))
                for x in entry.get("top_logprobs") or []
                if (near := x["token"]) != token and abs(x["logprob"] - entry["logprob"]) <= TIE
            )
        start += len(token)
    return False


def _parting(one: EndpointAnswer, other: EndpointAnswer) -> int:
    pairs = zip(one.text, other.text, strict=False)
    return next(
        (i for i, (x, y) in enumerate(pairs) if x != y), min(len(one.text), len(other.text))
    )


def difference(one: EndpointAnswer, other: EndpointAnswer) -> str:
    """Return where two answers diverge, for a report."""
    at = _parting(one, other)
    return f"at character {at}: {one.text[at : at + 40]!r} and {other.text[at : at + 40]!r}"
