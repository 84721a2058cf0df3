"""Turns a parsed HTTP or gRPC request into a validated and tokenised GenerateRequest."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from pdserve.errors import (
    ConfigError,
    ContextLengthExceeded,
    InvalidRequest,
    ModelNotFound,
    Unavailable,
    UnsupportedField,
)
from pdserve.model.token_cache import TokenCache
from pdserve.model.token_ids import TokenIds
from pdserve.model.tokenizer import Conversation, TextPair
from pdserve.types import Constraint, GenerateRequest, Parsing, SamplingParams, ServiceClass
from router.api.images import image_prompt
from router.request.constraints import check_constraint

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence

    from pdserve.model.token_cache import CachedParts
    from pdserve.model.tokenizer import Tokenizer
    from pdserve.types import Adapter, MediaItem, ModelInfo, StructuredOutput
    from router.fleet.on_demand import OnDemandModels
    from router.operations.rendering import ImagePrompt, Rendered

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Longer texts are tokenised in a thread, so that they do not delay the tokens of other streams.
INLINE_CHARS = 2048
_THREADS = 2
# Token ids of the conversations that are tokenised in the router: bodies of up to 64 KiB.
TOKEN_CACHE_BYTES = 16 << 20
# Cost of rendering one message without text, in characters of text.
_CHARS_OF_MESSAGE = 128
# Logprobs of one prompt, including alternatives: more would delay the tokens of other streams.
MAX_PROMPT_LOGPROBS = 1 << 15
# Sum of tokens and logprobs of all answers to a request. An answer that is not streamed is kept in
# memory until all are complete.
MAX_ANSWER_TOKENS = 1 << 18
# `max_tokens` of a request without a limit. It becomes the rest of the context once the prompt's
# length is known.
OPEN_ENDED = 1 << 30
# Values of router.tool_call_parser and router.reasoning_parser that do not name a parser.
AUTO, NONE = "auto", "none"
CHAT_ROLES = ("system", "developer", "user", "assistant", "tool")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")
# W3C Trace Context. Later versions may have more fields.
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-[ -~]{0,256})?")


# Text, token ids, or a conversation that the model's chat template renders.
Prompt = str | tuple[int, ...] | Conversation


@dataclass(slots=True)
class ParsedRequest:
    """A request whose fields are checked one by one, but not yet against the model.

    `given`: names of the sampling parameters that the client set. `sampling.max_tokens`: OPEN_ENDED
    if the client set no limit. `prompt_field`, `max_tokens_field`, `constraint_field`: names of
    these fields in the client's API, for errors.
    """

    model: str
    prompt: Prompt
    sampling: SamplingParams
    request_id: str
    timeout_s: float | None = None
    prompt_field: str = "prompt"
    max_tokens_field: str = "max_tokens"
    constraint_field: str = "structured_output"
    priority: int = 0
    service_class: ServiceClass = ServiceClass.INTERACTIVE
    resume: tuple[int, ...] = ()
    given: Collection[str] = ()
    add_special_tokens: bool | None = None  # None: for text, not for conversations
    cache_salt: str = ""
    session: str = ""
    echo: bool = False
    only_prompt: bool = False  # echo the prompt and generate nothing
    prompts: int = 1  # number of prompts in the client's request
    tokens: Sequence[int] | None = None  # of the prompt, if already tokenised and checked
    images: ImagePrompt | None = None  # the prompt, if it has images and is already checked
    # Fields of vLLM's chat request that control how the answer is parsed: tool_choice, ...
    parsing_options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def grammar_field(self) -> str:
        """The field from which the answer's grammar is built."""
        has_tools = isinstance(self.prompt, Conversation) and self.prompt.tools
        return "tools" if has_tools else self.constraint_field


class Origin(NamedTuple):
    """The caller of an embeddings request, and its timeout if it set one."""

    request_id: str
    tenant: str
    service_class: ServiceClass = ServiceClass.INTERACTIVE
    timeout_s: float | None = None


class Truncation(NamedTuple):
    """Truncation of an input to `most` tokens. `side`: "right" keeps the first tokens, "left" the
    last; None truncates texts as the tokenizer is configured."""

    most: int
    side: str | None

    def __call__(self, tokens: tuple[int, ...], second_at: int) -> tuple[tuple[int, ...], int]:
        """Truncate the tokens of an input. `second_at`: index of its second text's first token."""
        gone = max(0, len(tokens) - self.most)
        if self.side == "left":
            return tokens[gone:], max(0, second_at - gone)
        return tokens[: self.most], min(second_at, self.most)


def new_request_id(prefix: str) -> str:
    return f"{prefix}{os.urandom(16).hex()}"


def check_request_id(request_id: str, *, field: str) -> str:
    """Return the client's id. Raises InvalidRequest if it is not safe in logs and headers."""
    if not _REQUEST_ID.fullmatch(request_id):
        raise InvalidRequest(
            f"'{field}' must be 1 to 128 letters, digits or ._:/+=- characters", field=field
        )
    return request_id


def _valid_traceparent(given: str) -> str:
    """Return a client's `traceparent`, or "" if it is not valid: W3C has such headers ignored, and
    bytes that are no text could not be sent to workers."""
    return given if _TRACEPARENT.fullmatch(given) else ""


class Preprocessor:
    """Prepares requests for the models that `models` returns, and their LoRA adapters.

    `timeout_s`: default timeout of a request, and the longest it may set. `tool_parser`,
    `reasoning_parser`: from the router's configuration. `load`: loads the tokenizer of a model,
    once, when the first request needs it. `render`: as ImageRenderer.render. Raises ConfigError for
    a parser that needs vLLM if vLLM is not installed.
    """

    def __init__(
        self,
        models: Callable[[], Mapping[str, ModelInfo]],
        adapters: Callable[[], Mapping[str, Adapter]] = dict,
        on_demand: OnDemandModels | None = None,
        *,
        timeout_s: float,
        tool_parser: str = AUTO,
        reasoning_parser: str = AUTO,
        load: Callable[[ModelInfo], Coroutine[Any, Any, Tokenizer]],
        render: Callable[[ImagePrompt, ModelInfo, float], Awaitable[Rendered]],
    ) -> None:
        self._models = models
        self._adapters = adapters
        self._on_demand = on_demand
        self._timeout_s = timeout_s
        self._now = asyncio.get_running_loop().time
        self._tool_parser = tool_parser
        self._reasoning_parser = reasoning_parser
        self._has_vllm = find_spec("vllm") is not None
        for key, name in (
            ("tool_call_parser", tool_parser),
            ("reasoning_parser", reasoning_parser),
        ):
            if name not in (AUTO, NONE) and not self._has_vllm:
                text = f"router.{key}: {name} needs vLLM, which is not installed here"
                raise ConfigError(text, field=f"router.{key}")
        self._load = load
        self._render = render
        self._tokenizers: dict[str, asyncio.Task[Tokenizer]] = {}  # by digest
        self._preloaded: set[str] = set()
        self._token_cache = TokenCache(TOKEN_CACHE_BYTES)
        # Not the loop's default executor, where long prompts would delay uploads and DNS lookups.
        self._executor = ThreadPoolExecutor(_THREADS, thread_name_prefix="tokenise")

    def close(self) -> None:
        """End the threads. Queued texts are dropped."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def prepare(
        self, parsed: ParsedRequest, *, tenant: str = "", traceparent: str = ""
    ) -> GenerateRequest:
        """Validate and tokenise a request. Raises ClientError naming the field, or Unavailable if
        no worker has registered."""
        if (constraint := parsed.sampling.structured_output) is not None:
            check_constraint(constraint, field=parsed.constraint_field)
        timeout_s = self._timeout_s
        if parsed.timeout_s is not None:
            timeout_s = min(timeout_s, parsed.timeout_s)
        until = self._now() + timeout_s
        if self._on_demand is not None:
            await self._on_demand.wait_for(parsed.model, timeout_s)
        model, _ = self.find(parsed.model)
        sampling = _with_defaults(parsed, model.sampling_defaults)
        check_ids(sampling.stop_token_ids, model, field="stop_token_ids")
        check_ids(tuple(sampling.logit_bias), model, field="logit_bias")
        prompt, render_s = parsed.tokens, 0.0
        media: tuple[MediaItem, ...] = ()
        if prompt is None:
            images = parsed.images or await self._images_of(parsed, model)
            if images is None:
                prompt = await self._tokenise(parsed, model, tenant)
            else:
                began = self._now()
                prompt, media = await self._render(images, model, until)
                render_s = self._now() - began
        _check_scores(parsed, sampling, len(prompt))
        sampling = _fit(parsed, sampling, len(prompt), model)
        _check_resume(parsed.resume, sampling, model)
        parsing = None
        if isinstance(parsed.prompt, Conversation):
            parsing = await self._parsing(parsed, parsed.prompt, model)
            if parsing is not None and sampling.skip_special_tokens:
                # The markup of tool calls and reasoning may consist of special tokens.
                sampling = replace(sampling, skip_special_tokens=False)
        # Looked up again: the adapter may have been unloaded or replaced during tokenisation.
        model, adapter = self.find(parsed.model)
        return GenerateRequest(
            request_id=parsed.request_id,
            model=model.name,
            prompt_token_ids=prompt,
            sampling=sampling,
            resume=parsed.resume,
            deadline=until,
            priority=parsed.priority,
            service_class=parsed.service_class,
            tenant=tenant,
            traceparent=_valid_traceparent(traceparent),
            adapter=adapter,
            cache_salt=parsed.cache_salt,
            parsing=parsing,
            media=media,
            render_s=render_s,
            session=parsed.session,
        )

    async def _parsing(
        self, parsed: ParsedRequest, chat: Conversation, model: ModelInfo
    ) -> Parsing | None:
        """Return how the answer is parsed, or None if it has neither tool calls nor reasoning."""
        tokenizer = await self.tokenizer(model)
        fitting = tokenizer.parsers
        tools = fitting.tool_calls if self._tool_parser == AUTO else self._tool_parser
        reasoning = self._reasoning_parser
        if reasoning == AUTO:
            may_think = self._has_vllm and fitting.is_thinking(chat.variables)
            reasoning = fitting.reasoning if may_think else NONE
        tools = NONE if not chat.tools else tools
        if not (chat.tools or reasoning not in ("", NONE)):
            return None
        if chat.tools and tools in ("", NONE):
            text = f"'tools': no parser of tool calls is known for model {model.name}"
            if tools == NONE:
                text = "'tools': router.tool_call_parser is none"
            raise UnsupportedField(text, field="tools")
        if not self._has_vllm:
            text = "'tools': the router parses tool calls with vLLM, which is not installed there"
            raise UnsupportedField(text, field="tools")
        options = dict(parsed.parsing_options)
        if chat.variables:
            options["chat_template_kwargs"] = chat.variables
        if (constraint := parsed.sampling.structured_output) is not None:
            options |= _constraint_fields(constraint)
        if chat.tools:
            options["tools"] = chat.tools
        return Parsing(
            model.tokenizer,
            tokenizer.files,
            "" if tools == NONE else tools,
            "" if reasoning == NONE else reasoning,
            json.dumps(options),
            json.dumps({"chat_template_kwargs": chat.variables}),
        )

    def embedding_request(
        self,
        tokens: Sequence[int],
        second_text_at: int,
        model: ModelInfo,
        origin: Origin,
        index: int,
    ) -> GenerateRequest:
        """Return a request for the embedding of a prompt, or the score of a pair."""
        return GenerateRequest(
            request_id=f"{origin.request_id}-{index}",
            model=model.name,
            prompt_token_ids=tokens,
            sampling=SamplingParams(max_tokens=1),
            deadline=self._now() + (origin.timeout_s or self._timeout_s),
            service_class=origin.service_class,
            tenant=origin.tenant,
            second_text_at=second_text_at,
        )

    def find(self, name: str) -> tuple[ModelInfo, Adapter | None]:
        """Return the model with this name, or the adapter with its model. Raises ModelNotFound,
        InvalidRequest without a name if several are served, and Unavailable without workers."""
        models = self._models()
        if not models:
            raise Unavailable("no worker is registered", retry_after_s=1.0)
        if (found := find_model(models, name)) is not None:
            return found, None
        adapters = self._adapters()
        if (adapter := adapters.get(name)) is not None and adapter.model in models:
            return models[adapter.model], adapter
        if not name and len(models) == 1:
            return next(iter(models.values())), None
        names = [x for model in models.values() for x in model.names]
        served = ", ".join(sorted((*names, *adapters)))
        if not name:
            raise InvalidRequest(f"'model' is required; served: {served}", field="model")
        raise ModelNotFound(f"model {name!r} is not served; served: {served}", field="model")

    async def find_when_ready(self, name: str) -> ModelInfo:
        """Return the model with this name, or of this adapter, once it has workers. Raises as
        `prepare` does."""
        if self._on_demand is not None:
            await self._on_demand.wait_for(name, self._timeout_s)
        return self.find(name)[0]

    async def _images_of(self, parsed: ParsedRequest, model: ModelInfo) -> ImagePrompt | None:
        """Return the prompt if it is a conversation with images."""
        chat = parsed.prompt
        if not isinstance(chat, Conversation) or not any(x.parts for x in chat.messages):
            return None
        tokenizer, add = await self.tokenizer(model), parsed.add_special_tokens
        return prompt_with_images(chat, tokenizer, model, add, field=parsed.prompt_field)

    async def count_with_images(self, prompt: ImagePrompt, model: ModelInfo) -> tuple[int, ...]:
        """Return the token ids of a prompt with images. Raises as ImageRenderer.render."""
        return (await self._render(prompt, model, self._now() + self._timeout_s)).token_ids

    async def _tokenise(
        self, parsed: ParsedRequest, model: ModelInfo, tenant: str
    ) -> Sequence[int]:
        """Return the prompt's token ids."""
        prompt, field = parsed.prompt, parsed.prompt_field
        if isinstance(prompt, tuple):
            check_ids(prompt, model, field=field)
            return prompt
        tokenizer = await self.tokenizer(model)
        chars = _check_length(prompt, tokenizer, model, field=field)
        if isinstance(prompt, Conversation):
            chars += len(prompt.messages) * _CHARS_OF_MESSAGE
        # Shorter ones cost less than to look for their parts.
        parts = self.parts_of(tenant, parsed.cache_salt) if chars > INLINE_CHARS else None
        add = parsed.add_special_tokens
        work = partial(_encode, prompt, tokenizer, add, parts, field=field)
        tokens = await self.run(chars, work)
        check_ids(tokens, model, field=field)
        return tokens

    async def run(self, size: int, work: Callable[[], T]) -> T:
        """Call `work`, in a thread if `size` (characters, bytes or tokens) is large."""
        if size <= INLINE_CHARS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    def parts_of(self, tenant: str, salt: str = "") -> CachedParts:
        """Return the tenant's texts whose token ids are known here."""
        return self._token_cache.of(tenant, salt)

    async def text(self, token_ids: Sequence[int], model: ModelInfo) -> str:
        """Return the text of token ids."""
        tokenizer = await self.tokenizer(model)
        return await self.run(len(token_ids), partial(tokenizer.decode, token_ids))

    async def preload_tokenizers(self) -> None:
        """Load the tokenizers of models that have appeared, so that their first requests need not
        wait. After a failure the first request tries again."""
        for model in list(self._models().values()):
            if model.tokenizer and model.tokenizer not in self._preloaded:
                self._preloaded.add(model.tokenizer)
                await self.tokenizer_or_none(model)

    async def tokenizer_or_none(self, model: ModelInfo) -> Tokenizer | None:
        """Return None if the tokenizer cannot be loaded: prompts of token ids do not need it."""
        try:
            return await self.tokenizer(model)
        except Unavailable:
            return None

    async def tokenizer(self, model: ModelInfo) -> Tokenizer:
        """Return the model's tokenizer. Raises Unavailable if it cannot be loaded; the next request
        tries again."""
        task = self._tokenizers.get(model.tokenizer)
        if task is None:
            served = {each.tokenizer for each in self._models().values()}
            self._tokenizers = {x: kept for x, kept in self._tokenizers.items() if x in served}
            task = self._tokenizers[model.tokenizer] = asyncio.create_task(self._load(model))
        try:
            # Shielded: a client that leaves must not cancel a load that other requests wait for.
            return task.result() if task.done() else await asyncio.shield(task)
        except (ConfigError, Unavailable) as error:
            self._tokenizers.pop(model.tokenizer, None)
            logger.error("tokenizer of model %s: %s", model.name, error)
            raise NoTokenizer(model) from error


class NoTokenizer(Unavailable):
    """Raised for a text if the tokenizer of its model cannot be loaded."""

    def __init__(self, model: ModelInfo) -> None:
        super().__init__(f"the router has no tokenizer of model {model.name}; send token ids")


def prompt_with_images(
    chat: Conversation,
    tokenizer: Tokenizer,
    model: ModelInfo,
    add_special_tokens: bool | None = None,
    *,
    field: str,
) -> ImagePrompt:
    """Check a conversation with images, and return it for the renderer. Raises InvalidRequest
    naming `field` or the image."""
    _check_length(chat, tokenizer, model, field=field)
    tokenizer.check_tools(chat)
    return image_prompt(chat, model, add_special_tokens=add_special_tokens)


def prompt_tokens(
    parsed: ParsedRequest, tokenizer: Tokenizer | None, model: ModelInfo, parts: CachedParts
) -> Sequence[int]:
    """Return the token ids of a prompt. Raises InvalidRequest naming its field."""
    prompt, field = parsed.prompt, parsed.prompt_field
    if isinstance(prompt, tuple):
        tokens: Sequence[int] = prompt
    elif tokenizer is None:
        raise NoTokenizer(model)
    else:
        add = parsed.add_special_tokens
        tokens = encode_prompt(prompt, tokenizer, model, parts, add, field=field)
    _check_context(len(tokens), model, field=field)
    check_ids(tokens, model, field=field)
    return tokens


def encode_prompt(
    prompt: str | Conversation,
    tokenizer: Tokenizer,
    model: ModelInfo,
    parts: CachedParts,
    add_special_tokens: bool | None = None,
    *,
    field: str,
) -> Sequence[int]:
    """Render a prompt and return its token ids. Raises InvalidRequest naming `field`; a prompt that
    cannot fit is refused before it is rendered."""
    _check_length(prompt, tokenizer, model, field=field)
    return _encode(prompt, tokenizer, add_special_tokens, parts, field=field)


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
    except UnsupportedField:  # already names a more exact field
        raise
    except InvalidRequest as error:
        error.field = field
        raise


def embedding_tokens(
    prompt: str | tuple[int, ...] | TextPair,
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
    if len(tokens) >= model.max_model_len:
        raise ContextLengthExceeded(
            f"an input has {len(tokens)} tokens, and the model takes {model.max_model_len - 1}",
            field=field,
        )
    return tokens, second_at


def _constraint_fields(constraint: StructuredOutput) -> dict[str, Any]:
    """Return the fields of vLLM's chat request that express a constraint."""
    match constraint.kind:
        case Constraint.JSON_SCHEMA:
            schema = {"name": "answer", "schema": json.loads(constraint.value)}
            return {"response_format": {"type": "json_schema", "json_schema": schema}}
        case Constraint.JSON_OBJECT:
            return {"response_format": {"type": "json_object"}}
        case Constraint.CHOICE:
            return {"structured_outputs": {"choice": constraint.choices}}
        case kind:
            return {"structured_outputs": {kind.value: constraint.value}}


def find_model(models: Mapping[str, ModelInfo], name: str) -> ModelInfo | None:
    """Return the model with this name or alias. `models` are keyed by first name."""
    if name in models:
        return models[name]
    return next((model for model in models.values() if name in model.aliases), None)


def _with_defaults(parsed: ParsedRequest, defaults: Mapping[str, float]) -> SamplingParams:
    """Return the sampling parameters, with the model's defaults where the client set none."""
    missing: dict[str, Any] = {
        name: int(value) if name == "top_k" else value
        for name, value in defaults.items()
        if name not in parsed.given and name != "max_tokens"  # `_fit` applies this one
    }
    return replace(parsed.sampling, **missing) if missing else parsed.sampling


def check_ids(token_ids: Sequence[int], model: ModelInfo, *, field: str) -> None:
    if isinstance(token_ids, TokenIds) and token_ids.largest < model.vocab_size:
        return
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < model.vocab_size:
        wrong = next(x for x in token_ids if not 0 <= x < model.vocab_size)
        raise InvalidRequest(
            f"'{field}' has token id {wrong}; the model's ids are 0 to {model.vocab_size - 1}",
            field=field,
        )


def _check_scores(parsed: ParsedRequest, sampling: SamplingParams, prompt_tokens: int) -> None:
    if sampling.prompt_logprobs is None:
        return
    if parsed.resume:
        raise InvalidRequest(
            "'resume_token_ids' cannot be combined with logprobs of the prompt",
            field="resume_token_ids",
        )
    most = MAX_PROMPT_LOGPROBS // (sampling.prompt_logprobs + 1)
    if prompt_tokens > most:
        field = parsed.prompt_field
        raise InvalidRequest(
            f"'{field}' has {prompt_tokens} tokens; with logprobs of it and "
            f"{sampling.prompt_logprobs} alternatives it may have {most}",
            field=field,
        )


def _check_resume(resume: tuple[int, ...], sampling: SamplingParams, model: ModelInfo) -> None:
    field = "resume_token_ids"
    check_ids(resume, model, field=field)
    if resume and sampling.n > 1:
        raise InvalidRequest(f"'{field}' requires n to be 1, not {sampling.n}", field=field)
    if len(resume) > sampling.max_tokens:
        raise InvalidRequest(
            f"'{field}' has {len(resume)} tokens; the answer may have {sampling.max_tokens}",
            field=field,
        )


def _fit(
    parsed: ParsedRequest, sampling: SamplingParams, prompt_tokens: int, model: ModelInfo
) -> SamplingParams:
    """Return the sampling parameters with a `max_tokens` that fits the context."""
    left = _check_context(prompt_tokens, model, field=parsed.prompt_field)
    longest = _longest_answer(parsed, sampling)
    if sampling.max_tokens == OPEN_ENDED:
        most = int(model.sampling_defaults.get("max_tokens", left))
        return replace(sampling, max_tokens=min(left, most, longest))
    if sampling.max_tokens > left:
        field = parsed.max_tokens_field
        raise ContextLengthExceeded(
            f"'{parsed.prompt_field}' has {prompt_tokens} tokens and '{field}' is "
            f"{sampling.max_tokens}; the model's context is {model.max_model_len} tokens",
            field=field,
        )
    if sampling.max_tokens > longest:
        field = parsed.max_tokens_field
        raise InvalidRequest(
            f"'{field}' is {sampling.max_tokens}; with {parsed.prompts * sampling.n} answers and "
            f"{sampling.logprobs or 0} logprobs a token it may be {longest}",
            field=field,
        )
    return sampling


def _check_context(prompt_tokens: int, model: ModelInfo, *, field: str) -> int:
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


def _longest_answer(parsed: ParsedRequest, sampling: SamplingParams) -> int:
    """Return the longest answer that a request may ask for, in tokens. Only the context limits a
    single answer without logprobs."""
    answers = parsed.prompts * sampling.n
    if answers == 1 and sampling.logprobs is None:
        return OPEN_ENDED
    return MAX_ANSWER_TOKENS // (answers * ((sampling.logprobs or 0) + 1))
