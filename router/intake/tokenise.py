"""Renders and tokenises the prompts of a body. Nothing here waits, so that both executors
(executors.py) can run it: a thread of the router, and a child process."""

from __future__ import annotations

from collections.abc import Sequence  # noqa: TC003 - msgspec reads the annotations
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from pdserve.errors import ContextLengthExceeded, InvalidRequest, Unavailable
from pdserve.model.token_ids import TokenIds
from pdserve.model.tokenizer import Conversation, TextPair
from router.admission.constraints import check_constraint
from router.dialects.anthropic import CountTokensRequest
from router.dialects.embeddings import PoolingBody
from router.dialects.fields import GenerateBody, encode
from router.dialects.generation_rpc import GenerateMessage
from router.dialects.parsed_request import PromptText
from router.dialects.tokens import DetokenizeRequest, TokenizeRequest
from router.intake.image_prompts import ImagePrompt, image_prompt
from router.intake.prompt_texts import UNCHECKED, pieces_of, with_changes

if TYPE_CHECKING:
    from pdserve.model.token_cache import CachedParts, TokenCache
    from pdserve.model.tokenizer import Tokenizer
    from pdserve.types import ModelInfo
    from router.dialects.embeddings import Truncation
    from router.dialects.fields import Body
    from router.dialects.parsed_request import ParsedRequest
    from router.intake.prompt_texts import PromptTexts

# Looking for the parts of shorter texts costs more than to tokenise them.
_UNCACHED_CHARS = 2048
_GENERATES = (GenerateBody, GenerateMessage)


class Inputs(Struct, frozen=True):
    """Tokenised inputs, without duplicates. `second_at`: index at which an input's second text
    begins. `order`: index in `tokens` of each input; two per pair if embeddings are compared."""

    tokens: Sequence[Sequence[int]]
    second_at: list[int]
    order: list[int]


_NO_INPUTS = Inputs((), [], [])


class TokenisedBody(Struct, frozen=True, eq=False):
    """A body and its tokenised prompts.

    `parsed`, `prompts`: of a body that generates, one of each for every prompt. `inputs`: of a body
    whose texts are pooled. `answer`: to a body that only tokenises, unless its only prompt has
    images. `pieces`: kind and text of what guards check, if it is wanted.
    """

    body: Any
    parsed: Sequence[ParsedRequest] = ()
    prompts: Sequence[Sequence[int] | ImagePrompt] = ()
    inputs: Inputs = _NO_INPUTS
    answer: bytes = b""
    pieces: Sequence[tuple[str, str]] = ()


class NoTokenizer(Unavailable):
    """Raised for a text without the tokenizer of its model."""

    def __init__(self, model: ModelInfo) -> None:
        super().__init__(f"the router has no tokenizer of model {model.name}; send token ids")


def tokenise_body(
    body: Body | GenerateMessage,
    model: ModelInfo,
    cache: TokenCache,
    tenant: str,
    tokenizer: Tokenizer | None,
    texts: PromptTexts = UNCHECKED,
) -> TokenisedBody:
    """Parse a body and tokenise its prompts. `texts` concerns bodies that generate. Raises
    InvalidRequest naming the field, and NoTokenizer for text without a tokenizer."""
    if isinstance(body, _GENERATES) and type(body) is not CountTokensRequest:
        return _tokenised_request(body, model, cache, tenant, tokenizer, texts)
    if isinstance(body, PoolingBody):
        return TokenisedBody(body, inputs=_inputs(body, tokenizer, model))
    if isinstance(body, DetokenizeRequest):
        check_ids(body.tokens, model, field="tokens")
        decoded = _needed(tokenizer, model).decode(body.tokens)
        return TokenisedBody(body, answer=encode({"prompt": decoded}))
    assert isinstance(body, TokenizeRequest | CountTokensRequest)
    prompt = _tokenised(body.content(), tokenizer, model, cache, (tenant, ""))
    if isinstance(prompt, ImagePrompt):
        return TokenisedBody(body, prompts=[prompt])
    return TokenisedBody(body, answer=body.counted(prompt, model))


def _tokenised_request(
    body: GenerateBody | GenerateMessage,
    model: ModelInfo,
    cache: TokenCache,
    tenant: str,
    tokenizer: Tokenizer | None,
    texts: PromptTexts,
) -> TokenisedBody:
    parsed, prompts, pieces = body.parse(), [], []
    if texts.changes:
        parsed = [with_changes(x, texts.changes, tokenizer) for x in parsed]
        body = body.with_changes(texts.changes)
    for one in parsed:
        if (constraint := one.sampling.structured_output) is not None:
            check_constraint(constraint, field=one.constraint_field)
        text = PromptText(one.prompt, one.prompt_field, one.add_special_tokens)
        prompt = _tokenised(text, tokenizer, model, cache, (tenant, one.cache_salt))
        if not isinstance(prompt, ImagePrompt):
            check_ids(prompt, model, field=one.prompt_field)
        prompts.append(prompt)
        if texts.wanted:
            pieces += pieces_of(one, _needed(tokenizer, model))
    return TokenisedBody(body, parsed, prompts, pieces=pieces)


def _needed(tokenizer: Tokenizer | None, model: ModelInfo) -> Tokenizer:
    if tokenizer is None:
        raise NoTokenizer(model)
    return tokenizer


def _tokenised(
    text: PromptText,
    tokenizer: Tokenizer | None,
    model: ModelInfo,
    cache: TokenCache,
    of: tuple[str, str],
) -> Sequence[int] | ImagePrompt:
    """Return the token ids of a prompt, or the prompt checked if it has images. A prompt that
    cannot fit is refused before it is rendered. `of`: tenant and cache salt."""
    prompt, field, add = text.prompt, text.field, text.add_special_tokens
    if isinstance(prompt, tuple):
        return prompt
    tokenizer = _needed(tokenizer, model)
    chars = _check_length(prompt, tokenizer, model, field=field)
    if isinstance(prompt, Conversation) and (images := prompt.images):
        return image_prompt(prompt, images, model, add_special_tokens=add)
    parts = cache.of(*of) if chars > _UNCACHED_CHARS else None
    return _encode(prompt, tokenizer, add, parts, field=field)


def _check_length(
    prompt: str | Conversation, tokenizer: Tokenizer, model: ModelInfo, *, field: str
) -> int:
    """Return the number of characters of a prompt. Raises ContextLengthExceeded if no text of that
    length fits the model's context: rendering and tokenising it would be wasted."""
    chars = len(prompt) if isinstance(prompt, str) else prompt.chars
    most = model.max_model_len * tokenizer.longest_token
    if chars > most:
        raise ContextLengthExceeded(
            f"'{field}' has {chars} characters; the model's context is {model.max_model_len} "
            f"tokens, which are at most {most} characters",
            field=field,
        )
    return chars


def _encode(
    prompt: str | Conversation,
    tokenizer: Tokenizer,
    add_special_tokens: bool | None,
    parts: CachedParts | None,
    *,
    field: str,
) -> Sequence[int]:
    given = {"add_special_tokens": add_special_tokens, "parts": parts}
    options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    try:
        if isinstance(prompt, str):
            return tokenizer.encode(prompt, **options)
        return tokenizer.encode_chat(prompt, **options)
    except InvalidRequest as error:
        error.field = field
        raise


def _inputs(body: PoolingBody, tokenizer: Tokenizer | None, model: ModelInfo) -> Inputs:
    """Tokenise the inputs of a body. Raises InvalidRequest naming the field."""
    listed, truncation = body.listed(), body.truncation(model)
    if not model.cross_encoder:
        # Both texts of a pair are embedded, and the embeddings compared.
        listed = [x for y in listed for x in (y if isinstance(y, TextPair) else (y,))]
    unique = listed
    if not isinstance(listed[0], Conversation):  # which is one alone, and has no hash
        unique = list(dict.fromkeys(listed))
    places = {} if unique is listed else {x: i for i, x in enumerate(unique)}
    order = [places[x] for x in listed] if places else [0]
    field = body.input_field if places else "messages"
    found = [_input_tokens(x, truncation, tokenizer, model, field=field) for x in unique]
    return Inputs([x for x, _ in found], [x for _, x in found], order)


def _input_tokens(
    prompt: str | tuple[int, ...] | TextPair | Conversation,
    truncation: Truncation | None,
    tokenizer: Tokenizer | None,
    model: ModelInfo,
    *,
    field: str,
) -> tuple[tuple[int, ...], int]:
    """Return the token ids of an input, and the index at which its second text begins. Raises
    InvalidRequest naming `field`, and ContextLengthExceeded with both lengths."""
    second_at = 0
    if isinstance(prompt, tuple) and not isinstance(prompt, TextPair):
        tokens = prompt
    elif tokenizer is None:
        raise NoTokenizer(model)
    elif isinstance(prompt, Conversation):
        tokens = tuple(_encode(prompt, tokenizer, None, None, field=field))
    elif truncation is not None and truncation.side is None:
        texts = prompt if isinstance(prompt, TextPair) else [prompt]
        tokens, second_at = tokenizer.encode_within(texts, truncation.most)
    elif isinstance(prompt, TextPair):
        tokens, second_at = tokenizer.encode_pair(prompt)
    else:
        if truncation is None:  # a text that is truncated may have any length
            _check_length(prompt, tokenizer, model, field=field)
        tokens = tuple(_encode(prompt, tokenizer, None, None, field=field))
    if truncation is not None:
        tokens, second_at = truncation(tokens, second_at)
    check_ids(tokens, model, field=field)
    if len(tokens) > model.max_model_len:
        raise ContextLengthExceeded(
            f"an input has {len(tokens)} tokens, and the model takes {model.max_model_len}",
            field=field,
        )
    return tokens, second_at


def check_ids(token_ids: Sequence[int], model: ModelInfo, *, field: str) -> None:
    if not token_ids or (isinstance(token_ids, TokenIds) and token_ids.largest < model.vocab_size):
        return
    if not 0 <= min(token_ids) <= max(token_ids) < model.vocab_size:
        wrong = next(x for x in token_ids if not 0 <= x < model.vocab_size)
        raise InvalidRequest(
            f"'{field}' has token id {wrong}; the model's ids are 0 to {model.vocab_size - 1}",
            field=field,
        )


def check_context(prompt_tokens: int, model: ModelInfo, *, field: str) -> int:
    """Return the tokens of the context that a prompt leaves for the answer. Raises InvalidRequest
    if there are none, or if the prompt is empty."""
    if not prompt_tokens:
        raise InvalidRequest(f"'{field}' is empty", field=field)
    left = model.max_model_len - prompt_tokens
    if left < 1:
        raise ContextLengthExceeded(
            f"'{field}' has {prompt_tokens} tokens; the model's context is {model.max_model_len} "
            "tokens",
            field=field,
        )
    return left
