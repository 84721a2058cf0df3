"""Token ids in, token ids out: vLLM's POST /inference/v1/generate, with which trainers make their
rollouts (vllm/entrypoints/scale_out/token_in_token_out/protocol.py, 0.32)."""

from __future__ import annotations

import time
from base64 import b64encode
from io import BytesIO
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import numpy as np
from msgspec import UNSET, Meta, Struct, UnsetType, structs

from pdserve.errors import InternalError
from pdserve.types import MAX_LOGPROBS
from router.dialects.fields import (
    DONE,
    Count,
    ErrorBody,
    Extension,
    GenerateBody,
    Known,
    OpenAiBody,
    StaleKvValue,
    Strict,
    TokenId,
    UsageBody,
    encode,
    finite,
    knows,
    not_supported,
    usage_body,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.errors import PdserveError
    from pdserve.types import (
        GenerateRequest,
        PositionLogprobs,
        RoutedExperts,
        TokenLogprob,
        TokenSpan,
    )
    from router.attempt.answer import AnswerDelta
    from router.dialects.fields import Writer
    from router.dialects.parsed_request import ParsedRequest

DEFAULT_MAX_TOKENS = 16  # vLLM's
_NULL = Known()
KNOWN: dict[str, Known] = {
    "content_parts": _NULL,
    "ec_transfer_params": _NULL,
    "features": _NULL,
    "kv_transfer_params": _NULL,
    "reasoning_ended": _NULL,
    "reasoning_parser_kwargs": _NULL,
    "token_offsets": _NULL,
}
KNOWN_OF_SAMPLING: dict[str, Known] = {
    "allowed_token_ids": _NULL,
    "bad_words": Known(([],)),
    "detokenize": Known((True, False)),
    "extra_args": _NULL,
    "flat_logprobs": Known((False,)),
    "output_kind": Known((0, 1, 2)),
    "prompt_logprobs": _NULL,
    "routed_experts_prompt_start": Known((0,)),
    "skip_clone": Known((True, False)),
    "skip_reading_prefix_cache": Known((False,)),
    "spaces_between_special_tokens": Known((True,)),
    "truncate_prompt_tokens": _NULL,
}


class TokenStreamOptions(Strict):
    include_usage: Annotated[bool | None, Meta(description="The last chunk has the usage.")] = None


@knows(KNOWN_OF_SAMPLING)
class TokenSampling(OpenAiBody, kw_only=True):
    """vLLM's sampling parameters."""

    max_tokens: Count | None = None
    n: Annotated[int, Meta(ge=1, le=128, description="Number of answers.")] | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    routed_experts: Annotated[
        bool | None,
        Meta(description="Return the experts that computed each token. See docs/weights.md."),
    ] = None

    def request_for(self, token_ids: tuple[int, ...]) -> ParsedRequest:
        own = {"prompt_field": "token_ids", "default_tokens": DEFAULT_MAX_TOKENS}
        form, given = (None, "sampling_params"), self.given("n", "logprobs", "routed_experts")
        return self._request(token_ids, self.max_tokens, form, given, own)


@knows(KNOWN)
class TokenGenerateRequest(GenerateBody, kw_only=True):
    """Body of POST /inference/v1/generate."""

    id_prefix: ClassVar[str] = "gen-"
    token_ids: Annotated[list[TokenId], Meta(min_length=1, description="The prompt.")]
    sampling_params: TokenSampling
    request_id: str | None = None
    stream_options: TokenStreamOptions | None = None
    return_token_ids: Annotated[
        bool | None, Meta(description="Return `prompt_token_ids`, too.")
    ] = None
    output_mode: Annotated[
        Literal["tokens", "text"] | None, Meta(description="`text` returns the text, too.")
    ] = None
    cache_salt: str | None = None
    priority: int | None = None
    stale_kv: StaleKvValue = None

    def named_id(self) -> str | None:
        return self.request_id

    def parse(self) -> list[ParsedRequest]:
        if self.sampling_params.stream is not None:
            raise not_supported("sampling_params.stream", "set stream beside sampling_params")
        fields = self.given("model", "cache_salt", "priority", "stale_kv")
        sampling = structs.replace(self.sampling_params, **fields)
        return [sampling.request_for(tuple(self.token_ids))]

    def without_prompt(self) -> GenerateBody:
        return structs.replace(self, token_ids=[0])

    def writer(self, request_id: str, made: Sequence[GenerateRequest]) -> Writer:
        request = made[0]
        form = _Form(
            request_id,
            request.served_name,
            is_streamed=bool(self.stream),
            has_text=self.output_mode == "text",
            has_usage=self.stream_options is not None and bool(self.stream_options.include_usage),
            prompt=request.prompt_token_ids if self.return_token_ids else None,
        )
        return TokenWriter(form)


class TokenLogprobBody(Struct, omit_defaults=True):
    token_id: int
    logprob: float
    rank: int | None = None
    top_logprobs: list[TokenLogprobBody] = []


class LogprobsBody(Struct):
    content: list[TokenLogprobBody]


class VersionSpan(Struct):
    """Tokens from `start` to before `end` were sampled with the weights `version`, by `worker`.
    `stale_kv_tokens`: positions that they attended to, with KV of older weights."""

    version: str
    start: int
    end: int
    worker: str | UnsetType = UNSET
    stale_kv_tokens: int = 0


class TokenChoice(Struct, kw_only=True):
    index: int
    token_ids: list[int]
    text: str | UnsetType = UNSET
    logprobs: LogprobsBody | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    weight_versions: list[VersionSpan] | None = None
    stale_kv_tokens: int | None = None
    routed_experts: str | UnsetType = UNSET


class TokenResponse(Struct, kw_only=True):
    """A whole answer, or a chunk of a streamed one."""

    request_id: str
    model: str
    created: int
    output_mode: str
    choices: list[TokenChoice]
    usage: UsageBody | None = None
    prompt_token_ids: list[int] | UnsetType = UNSET
    pdserve: Extension | UnsetType = UNSET


class _Form(Struct, frozen=True):
    request_id: str
    model: str
    is_streamed: bool
    has_text: bool
    has_usage: bool
    prompt: Sequence[int] | None


class TokenWriter:
    """Encodes an answer, streamed or whole. State: the choices so far, by index, and their experts;
    `_sent`: a chunk was sent."""

    def __init__(self, form: _Form) -> None:
        self._form, self._created = form, int(time.time())
        self._choices: dict[int, TokenChoice] = {}
        self._experts: dict[int, list[RoutedExperts]] = {}
        self._last: AnswerDelta | None = None
        self._sent = False

    def write(self, delta: AnswerDelta) -> bytes:
        whole = self._add(delta)
        if delta.receipt is not None:
            self._last = delta
            self._put_versions(delta.receipt.spans)
        if not self._form.is_streamed:
            return b""
        choice = self._choice(delta)
        choice.weight_versions = whole.weight_versions
        choice.stale_kv_tokens = whole.stale_kv_tokens
        if delta.finish_reason is not None:
            choice.routed_experts = whole.routed_experts
        # The versions of all answers are known with the receipt, in the very last delta.
        others = [
            TokenChoice(
                index=x.index,
                token_ids=[],
                weight_versions=x.weight_versions,
                stale_kv_tokens=x.stale_kv_tokens,
            )
            for x in self._choices.values()
            if delta.receipt is not None and x.index != delta.index
        ]
        return b"data: %b\n\n" % encode(self._response([choice, *others], delta))

    def end(self) -> bytes:
        """Raises InternalError if an answer has no finish reason."""
        if self._last is None or any(x.finish_reason is None for x in self._choices.values()):
            raise InternalError("the answer ended without a finish reason")
        if self._form.is_streamed:
            return DONE
        choices = [choice for _, choice in sorted(self._choices.items())]
        return encode(self._response(choices, self._last))

    def fail(self, error: PdserveError) -> bytes:
        if not self._form.is_streamed:
            raise error
        return b"data: %b\n\n" % encode(ErrorBody.of(error))

    def _add(self, delta: AnswerDelta) -> TokenChoice:
        """Add a delta to its answer, which for a stream has only the number of its tokens."""
        new, whole = self._choice(delta), self._choices.get(delta.index)
        if delta.routed_experts is not None:
            self._experts.setdefault(delta.index, []).append(delta.routed_experts)
        if delta.finish_reason is not None and (experts := self._experts.pop(delta.index, None)):
            new.routed_experts = _npy(experts)
        if whole is None:
            self._choices[delta.index] = new
            return new
        whole.token_ids += new.token_ids
        whole.finish_reason, whole.stop_reason = new.finish_reason, new.stop_reason
        whole.routed_experts = new.routed_experts
        if not self._form.is_streamed:
            if whole.text is not UNSET and new.text is not UNSET:
                whole.text += new.text
            if whole.logprobs is not None and new.logprobs is not None:
                whole.logprobs.content += new.logprobs.content
            whole.logprobs = whole.logprobs or new.logprobs
        return whole

    def _choice(self, delta: AnswerDelta) -> TokenChoice:
        return TokenChoice(
            index=delta.index,
            token_ids=list(delta.token_ids),
            text=delta.text if self._form.has_text else UNSET,
            logprobs=_logprobs(delta.logprobs) if delta.logprobs else None,
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
        )

    def _put_versions(self, spans: Sequence[TokenSpan]) -> None:
        for choice in self._choices.values():
            found = [x for x in spans if x.answer == choice.index]
            choice.weight_versions = [
                VersionSpan(x.version, x.start, x.end, x.worker, x.stale_kv_tokens) for x in found
            ] or [VersionSpan("default", 0, len(choice.token_ids))]
            choice.stale_kv_tokens = max(x.stale_kv_tokens for x in choice.weight_versions)

    def _response(self, choices: list[TokenChoice], delta: AnswerDelta) -> TokenResponse:
        form = self._form
        response = TokenResponse(
            request_id=form.request_id,
            model=form.model,
            created=self._created,
            output_mode="text" if form.has_text else "tokens",
            choices=choices,
        )
        if form.prompt is not None and not self._sent:
            response.prompt_token_ids = list(form.prompt)
        self._sent = True
        if delta.usage is not None and (form.has_usage or not form.is_streamed):
            response.usage = usage_body(delta.usage)
        if delta.receipt is not None:
            response.pdserve = Extension(delta.receipt)
        return response


def _npy(parts: Sequence[RoutedExperts]) -> str:
    """Return the experts of an answer's tokens as a NumPy file in base64, as vLLM does: an array of
    shape (tokens, layers, experts). Raises InternalError if they do not fit together."""
    first = parts[0]
    shape = first.layers, first.per_token
    size, ids = first.layers * first.per_token * first.id_bytes, b"".join(x.ids for x in parts)
    kind = {1: "|u1", 2: "<u2"}.get(first.id_bytes)
    alike = all((x.layers, x.per_token, x.id_bytes) == (*shape, first.id_bytes) for x in parts)
    if kind is None or not size or not alike or len(ids) % size:
        raise InternalError("workers sent routed experts of different shapes")
    array = np.frombuffer(ids, kind).reshape(-1, *shape)
    file = BytesIO()
    np.save(file, array, allow_pickle=False)
    return b64encode(file.getbuffer()).decode()


def _logprobs(positions: Sequence[PositionLogprobs]) -> LogprobsBody:
    content = []
    for position in positions:
        one = _logprob(position.sampled)
        one.top_logprobs = [_logprob(x) for x in position.top]
        content.append(one)
    return LogprobsBody(content)


def _logprob(token: TokenLogprob) -> TokenLogprobBody:
    return TokenLogprobBody(token.token_id, finite(token), token.rank or None)
