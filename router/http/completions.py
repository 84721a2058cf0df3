"""The body of POST /v1/completions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.errors import UnsupportedField
from pdserve.types import MAX_LOGPROBS
from router.http.asked import (
    Asked,
    read_model,
    read_priority,
    read_resume,
    read_service_class,
    read_streaming,
)
from router.http.fields import COMPLETIONS, check_names
from router.http.reading import Fields, as_token_ids, kind_of, refuse
from router.http.sampling import read_sampling
from router.intake import Ask, TextPrompt, TokenPrompt

if TYPE_CHECKING:
    from router.intake import Prompt

# OpenAI's, where a completion gives no length.
DEFAULT_MAX_TOKENS = 16


def read_completion(body: dict[str, object], request_id: str) -> Asked:
    """Raises InvalidRequest naming the field at fault."""
    check_names(body, COMPLETIONS)
    fields = Fields(body)
    max_tokens = fields.integer("max_tokens", minimum=1)
    logprobs = fields.integer("logprobs", minimum=0)
    if logprobs is not None and logprobs > MAX_LOGPROBS:
        refuse("logprobs", f"must be at most {MAX_LOGPROBS}, not {logprobs}")
    ask = Ask(
        model=read_model(fields),
        prompt=_prompt(fields.get("prompt")),
        sampling=read_sampling(
            fields, max_tokens=max_tokens or DEFAULT_MAX_TOKENS, logprobs=logprobs
        ),
        request_id=request_id,
        fills_context=False,
        priority=read_priority(fields),
        service_class=read_service_class(fields),
        resume=read_resume(fields),
    )
    return Asked(ask, read_streaming(fields))


def _prompt(value: object) -> Prompt:
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        if len(value) > 1:
            raise UnsupportedField(
                f"prompt holds {len(value)} prompts; one is taken a request", field="prompt"
            )
        value = value[0]
    if isinstance(value, str):
        return TextPrompt(value)
    if not isinstance(value, list):
        refuse("prompt", f"must be a string or an array of token ids, not {kind_of(value)}")
    return TokenPrompt(as_token_ids(value, "prompt"))
