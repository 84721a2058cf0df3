"""Text of tokens, from vLLM's own detokeniser."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from tokenizers.decoders import DecodeStream
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.detokenizer import (
    FastIncrementalDetokenizer,
    IncrementalDetokenizer,
    SlowIncrementalDetokenizer,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.v1.engine import EngineCoreRequest

_REPLACEMENT = "\ufffd"
# Number of preceding tokens on which the text of a token may depend.
_CONTEXT_TOKENS = 16
# A character has up to four bytes, so up to three tokens may hold an incomplete one.
_MOST_INCOMPLETE = 3


def detokenizer_of(tokenizer: Any, prompt: Sequence[int]) -> IncrementalDetokenizer:
    """Return a detokeniser for the answer to `prompt` that includes special tokens."""
    context = list(prompt[-_CONTEXT_TOKENS:])
    sampling = SamplingParams(skip_special_tokens=False)
    request = SimpleNamespace(
        request_id="", prompt_token_ids=context, prompt_embeds=None, sampling_params=sampling
    )
    made = IncrementalDetokenizer.from_new_request(tokenizer, cast("EngineCoreRequest", request))
    mend_start(made, tokenizer, prompt)
    return made


def mend_start(detokenizer: Any, tokenizer: Any, prompt: Sequence[int]) -> None:
    """Complete an incomplete last character of the prompt in the answer. vLLM's fast detokeniser
    would repeat the whole prompt in the answer, its slow one would lose the character."""
    context = list(prompt[-_CONTEXT_TOKENS:])
    size = _incomplete(tokenizer, context)
    if not size:
        return
    rest, begun = context[:-size], context[-size:]
    if isinstance(detokenizer, FastIncrementalDetokenizer):
        skip = detokenizer.skip_special_tokens
        said, text = (tokenizer.decode(x, skip_special_tokens=skip) for x in (rest, context))
        stream = DecodeStream(ids=rest, skip_special_tokens=skip)
        for token_id in begun:
            said += stream.step(tokenizer._tokenizer, token_id) or ""
        detokenizer.stream = _Continued(stream, text[len(said) :])
    elif isinstance(detokenizer, SlowIncrementalDetokenizer):
        detokenizer.read_offset -= size


class _Continued:
    """A stream whose first text omits `said`, the prompt's text, except for characters that are
    completed now."""

    def __init__(self, stream: DecodeStream, said: str) -> None:
        self._stream, self._said = stream, said

    def step(self, tokenizer: Any, token_id: int) -> str | None:
        text: str | None = self._stream.step(tokenizer, token_id)
        if text and self._said:
            whole = self._said if text.startswith(self._said) else self._said.rstrip(_REPLACEMENT)
            text, self._said = text.removeprefix(whole), ""
        return text


def _incomplete(tokenizer: Any, context: Sequence[int]) -> int:
    """Return the number of last tokens whose text is an incomplete character, or all if more than
    three."""
    for size in range(min(_MOST_INCOMPLETE, len(context)) + 1):
        rest = context[: len(context) - size]
        if not tokenizer.decode(rest, skip_special_tokens=False).endswith(_REPLACEMENT):
            return size
    return len(context)
