"""The one door for requests: both faces hand over what was asked, and get a GenerateRequest that
is tokenised, checked against its model and has its deadline."""

from __future__ import annotations

import asyncio
import re
import secrets
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pdserve import deadline
from pdserve.errors import (
    ContextLengthExceeded,
    InvalidRequest,
    ModelNotFound,
    Unavailable,
)
from pdserve.lean import lean
from pdserve.types import GenerateRequest, ServiceClass
from router.tokenizers import TokenizerCache

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pdserve.tokenizer import ChatMessage, Tokenizer
    from pdserve.types import ModelInfo, SamplingParams

# A longer text is tokenised in a thread: it must not hold up the tokens of all other streams.
INLINE_CHARS = 2048
# Stands for "what the context leaves" until the prompt's length is known.
OPEN_ENDED = 1 << 30
CHAT_ROLES = ("system", "developer", "user", "assistant")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")


@lean
@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Text, tokenised with the model's special tokens."""

    text: str


@lean
@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids, taken as they are."""

    token_ids: tuple[int, ...]


@lean
@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation, put through the model's chat template."""

    messages: tuple[ChatMessage, ...]


Prompt = TextPrompt | TokenPrompt | ChatPrompt


@lean
@dataclass(frozen=True, slots=True)
class Ask:
    """What a client asked for, fields already checked one by one.

    With `fills_context` the client gave no length, and `sampling.max_tokens` is OPEN_ENDED. The
    `…_field` names are the client's own, for the errors.
    """

    model: str
    prompt: Prompt
    sampling: SamplingParams
    request_id: str
    fills_context: bool
    timeout_s: float | None = None
    prompt_field: str = "prompt"
    max_tokens_field: str = "max_tokens"
    priority: int = 0
    service_class: ServiceClass = ServiceClass.INTERACTIVE
    resume: tuple[int, ...] = ()


def new_request_id(prefix: str) -> str:
    """A request id that nobody else has."""
    return f"{prefix}{secrets.token_hex(16)}"


def check_request_id(request_id: str, *, field: str) -> str:
    """The id as the client gave it. Raises InvalidRequest where it cannot go into logs and
    headers as it is."""
    if not _REQUEST_ID.fullmatch(request_id):
        raise InvalidRequest(
            f"{field} must be 1 to 128 letters, digits or ._:/+=- characters", field=field
        )
    return request_id


class Intake:
    """Makes requests. `models` tells what is served now, and `why_none` what to say where nothing
    is; `timeout_s` is the deadline of a request that names none, and the latest that one can
    name."""

    def __init__(
        self,
        models: Callable[[], Mapping[str, ModelInfo]],
        *,
        timeout_s: float,
        tokenizers: TokenizerCache | None = None,
        why_none: Callable[[], str] = lambda: "no worker has registered yet",
    ) -> None:
        self._models = models
        self._why_none = why_none
        self._timeout_s = timeout_s
        self._tokenizers = tokenizers or TokenizerCache()

    async def make(self, ask: Ask, *, tenant: str = "", traceparent: str = "") -> GenerateRequest:
        """Raises ClientError naming the field at fault, or Unavailable without any worker."""
        seconds = self._timeout_s if ask.timeout_s is None else min(ask.timeout_s, self._timeout_s)
        until = deadline.after(seconds)
        model = self._find(ask.model)
        _check_sampling(ask.sampling, model)
        prompt = await self._tokenise(ask, model)
        _check_ids(prompt, model.vocab_size, field=ask.prompt_field)
        sampling = _fit(ask, len(prompt), model.max_model_len)
        _check_resume(ask.resume, sampling, model)
        return GenerateRequest(
            request_id=ask.request_id,
            model=model.name,
            prompt_token_ids=prompt,
            sampling=sampling,
            resume=ask.resume,
            deadline=until,
            priority=ask.priority,
            service_class=ask.service_class,
            tenant=tenant,
            traceparent=traceparent,
        )

    def _find(self, name: str) -> ModelInfo:
        models = self._models()
        if not models:
            raise Unavailable(self._why_none(), retry_after_s=1.0)
        if name in models:
            return models[name]
        if not name and len(models) == 1:
            return next(iter(models.values()))
        served = ", ".join(sorted(models))
        if not name:
            raise InvalidRequest(f"model is needed: {served} are served", field="model")
        raise ModelNotFound(f"model {name!r} is not served here; {served} is", field="model")

    async def _tokenise(self, ask: Ask, model: ModelInfo) -> tuple[int, ...]:
        if isinstance(ask.prompt, TokenPrompt):
            return ask.prompt.token_ids
        tokenizer = await self._tokenizers.get(model)
        try:
            if _length(ask.prompt) <= INLINE_CHARS:
                return _encode(tokenizer, ask.prompt)
            return await asyncio.to_thread(_encode, tokenizer, ask.prompt)
        except InvalidRequest as error:
            error.field = ask.prompt_field
            raise


def _length(prompt: TextPrompt | ChatPrompt) -> int:
    if isinstance(prompt, TextPrompt):
        return len(prompt.text)
    return sum(len(message.content) for message in prompt.messages)


def _encode(tokenizer: Tokenizer, prompt: TextPrompt | ChatPrompt) -> tuple[int, ...]:
    if isinstance(prompt, TextPrompt):
        return tokenizer.encode(prompt.text)
    return tokenizer.encode_chat(prompt.messages)


def _check_sampling(sampling: SamplingParams, model: ModelInfo) -> None:
    _check_ids(sampling.stop_token_ids, model.vocab_size, field="stop_token_ids")
    _check_ids(tuple(sampling.logit_bias), model.vocab_size, field="logit_bias")


def _check_ids(token_ids: Sequence[int], vocab_size: int, *, field: str) -> None:
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        wrong = next(x for x in token_ids if not 0 <= x < vocab_size)
        raise InvalidRequest(
            f"{field} holds the token id {wrong}; the model has 0 to {vocab_size - 1}", field=field
        )


def _check_resume(resume: tuple[int, ...], sampling: SamplingParams, model: ModelInfo) -> None:
    field = "resume_token_ids"
    _check_ids(resume, model.vocab_size, field=field)
    if resume and sampling.n > 1:
        raise InvalidRequest(f"{field} is for one answer, and n is {sampling.n}", field=field)
    if len(resume) > sampling.max_tokens:
        raise InvalidRequest(
            f"{field} has {len(resume)} tokens, and the answer has at most {sampling.max_tokens}",
            field=field,
        )


def _fit(ask: Ask, prompt_len: int, max_model_len: int) -> SamplingParams:
    """The sampling parameters with a `max_tokens` for which the context has room."""
    if not prompt_len:
        raise InvalidRequest(f"{ask.prompt_field} is empty", field=ask.prompt_field)
    left = max_model_len - prompt_len
    if left < 1:
        raise ContextLengthExceeded(
            f"{ask.prompt_field} has {prompt_len} tokens; the model's context is {max_model_len} "
            f"tokens, prompt and answer together",
            field=ask.prompt_field,
        )
    if ask.fills_context:
        return replace(ask.sampling, max_tokens=left)
    if ask.sampling.max_tokens > left:
        raise ContextLengthExceeded(
            f"{ask.prompt_field} has {prompt_len} tokens and {ask.max_tokens_field} is "
            f"{ask.sampling.max_tokens}; the model's context is {max_model_len} tokens",
            field=ask.max_tokens_field,
        )
    return ask.sampling
