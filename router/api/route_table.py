"""The endpoints of the HTTP API. Dispatch, authentication, batches, `/openapi.json` and docs/api.md
read this table: a new endpoint is one entry and its handler."""

from __future__ import annotations

from enum import Enum, auto
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from router.api.batch.http import BatchApi, CreateBatchRequest
from router.api.models import LoadAdapterRequest, ModelsApi, UnloadAdapterRequest
from router.api.weights import (
    FLUSH_PATHS,
    REFUSED_PATHS,
    CollectiveRpcBody,
    PauseBody,
    UpdateWeightsBody,
    WeightsApi,
)
from router.dialects.anthropic import (
    CountTokensRequest,
    MessageBody,
    MessageError,
    MessagesRequest,
)
from router.dialects.embeddings import (
    CohereEmbedRequest,
    EmbeddingsRequest,
    PoolRequest,
    RerankRequest,
    ScoreRequest,
)
from router.dialects.fields import ErrorBody
from router.dialects.openai import ChatRequest, CompletionRequest
from router.dialects.openai_writer import Response
from router.dialects.responses import ResponsesRequest
from router.dialects.responses_writer import ResponseBody
from router.dialects.token_generate import TokenGenerateRequest, TokenResponse
from router.dialects.tokens import DetokenizeRequest, TokenizeRequest

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from aiohttp import web
    from msgspec import Struct

    from router.api.answer_sinks import AnsweredLine
    from router.api.console.http import Console
    from router.api.generation import GenerationApi
    from router.api.pooling_endpoints import PoolingApi
    from router.api.status import StatusApi
    from router.api.stored_responses import ResponseApi
    from router.api.tokenizer import TokenizerApi, TokenizerBody
    from router.dialects.embeddings import PoolingRequest
    from router.dialects.fields import Body, GenerateBody

    # Called with the request and the names in its path.
    Handler = Callable[..., Awaitable[web.StreamResponse]]
    # Called with the body of a line, the tenant and a timeout in seconds. Raises PdserveError.
    AnswerLine = Callable[[bytes, str, float], Awaitable[AnsweredLine]]


class Credential(Enum):
    """Required credential. NONE includes the console, which checks keys itself: its page needs no
    key."""

    NONE = auto()
    TENANT = auto()
    ADMIN = auto()


class Handlers(NamedTuple):
    """The objects whose methods answer requests."""

    generation: GenerationApi
    responses: ResponseApi
    pooling: PoolingApi
    tokenizer: TokenizerApi
    models: ModelsApi
    weights: WeightsApi
    batches: BatchApi
    status: StatusApi
    console: Console


class Route(NamedTuple):
    """An endpoint. The routes of a path have the same credential and errors.

    `text`: its row in docs/api.md; "" leaves the route out of all documents. `body`, `answer`:
    structs of the JSON bodies. `content`: content type of the answer. `streams`: the answer may
    also be server-sent events. `line`: answers a line of a batch. `errors`: struct of an error.
    `allows_origins`: pages of configured origins may read the answer.
    """

    method: str
    path: str
    handler: Callable[[Handlers], Handler]
    text: str
    body: type[Body] | None = None
    answer: type[Struct] | None = None
    content: str = "application/json"
    streams: bool = False
    line: Callable[[Handlers], AnswerLine] | None = None
    credential: Credential = Credential.TENANT
    errors: type[ErrorBody | MessageError] = ErrorBody
    allows_origins: bool = True


def _generates(
    path: str,
    body: type[GenerateBody],
    answer: type[Struct],
    text: str,
    *,
    in_batches: bool = True,
    errors: type[ErrorBody | MessageError] = ErrorBody,
) -> Route:
    return Route(
        "POST",
        path,
        lambda on: partial(on.generation.generate, body),
        text,
        body,
        answer,
        streams=True,
        line=(lambda on: partial(on.generation.answer_line, body)) if in_batches else None,
        errors=errors,
    )


def _pools(path: str, body: type[PoolingRequest], text: str, *, in_batches: bool = False) -> Route:
    return Route(
        "POST",
        path,
        lambda on: partial(on.pooling.pool, body),
        text,
        body,
        line=(lambda on: partial(on.pooling.answer_line, body)) if in_batches else None,
    )


def _tokenises(
    path: str,
    body: type[TokenizerBody],
    text: str,
    errors: type[ErrorBody | MessageError] = ErrorBody,
) -> Route:
    return Route(
        "POST", path, lambda on: partial(on.tokenizer.tokens, body), text, body, errors=errors
    )


def _adapters(
    path: str, body: type[Body], handler: Callable[[Handlers], Handler], text: str
) -> Route:
    admin = Credential.ADMIN
    return Route("POST", path, handler, text, body, content="text/plain", credential=admin)


def _weights(
    path: str,
    handler: Callable[[Handlers], Handler],
    text: str,
    body: type[Body] | None = None,
    method: str = "POST",
) -> Route:
    return Route(method, path, handler, f"{text} (admin)", body, credential=Credential.ADMIN)


def _public(
    path: str, handler: Callable[[Handlers], Handler], text: str, method: str = "GET"
) -> Route:
    return Route(method, path, handler, text, credential=Credential.NONE)


def _get(path: str, handler: Callable[[Handlers], Handler], text: str) -> Route:
    return Route("GET", path, handler, text)


def _console(method: str, path: str) -> Route:
    return Route(
        method,
        path,
        lambda on: on.console.handle,
        text="",
        credential=Credential.NONE,
        allows_origins=False,
    )


ROUTES = (
    _generates("/v1/chat/completions", ChatRequest, Response, "OpenAI's chat; streamed or whole"),
    _generates("/v1/completions", CompletionRequest, Response, "OpenAI's completions"),
    _generates("/v1/responses", ResponsesRequest, ResponseBody, "OpenAI's Responses"),
    _get("/v1/responses/{response_id}", lambda on: on.responses.show, "Show a stored response"),
    Route(
        "DELETE",
        "/v1/responses/{response_id}",
        lambda on: on.responses.delete,
        "Delete a stored response",
    ),
    _get(
        "/v1/responses/{response_id}/input_items",
        lambda on: on.responses.input_items,
        "Refused: use `previous_response_id`",
    ),
    Route(
        "POST",
        "/v1/responses/{response_id}/cancel",
        lambda on: on.responses.cancel,
        "Refused: no response is generated in the background",
    ),
    _generates(
        "/v1/messages",
        MessagesRequest,
        MessageBody,
        "Anthropic's Messages",
        in_batches=False,
        errors=MessageError,
    ),
    _generates(
        "/inference/v1/generate",
        TokenGenerateRequest,
        TokenResponse,
        "Token ids in and out, as vLLM's; with the version of the weights of each token",
        in_batches=False,
    ),
    _tokenises(
        "/v1/messages/count_tokens", CountTokensRequest, "Tokens of a conversation", MessageError
    ),
    _pools("/v1/embeddings", EmbeddingsRequest, "Embeddings from pooling workers", in_batches=True),
    _pools("/v1/score", ScoreRequest, "Scores of pairs of texts"),
    _pools("/v1/rerank", RerankRequest, "Documents by their score for a query"),
    _pools("/v2/embed", CohereEmbedRequest, "Embeddings in Cohere's form"),
    _pools("/v2/rerank", RerankRequest, "Same as `/v1/rerank`"),
    _pools("/score", ScoreRequest, "Same as `/v1/score`"),
    _pools("/rerank", RerankRequest, "Same as `/v1/rerank`"),
    _pools("/pooling", PoolRequest, "Embeddings in vLLM's form"),
    _tokenises("/tokenize", TokenizeRequest, "Token ids of a text or a conversation"),
    _tokenises("/detokenize", DetokenizeRequest, "Text of token ids"),
    _get(
        "/tokenizer_info",
        lambda on: on.tokenizer.info,
        "The tokenizer's configuration and chat template",
    ),
    _get("/v1/models", lambda on: on.models.list, "List models and LoRA adapters"),
    _get("/v1/models/{model}", lambda on: on.models.show, "Show a model or adapter"),
    Route(
        "POST",
        "/v1/files",
        lambda on: on.batches.upload,
        "Upload a file: multipart, with `file` and `purpose=batch`",
    ),
    _get(
        "/v1/files",
        lambda on: on.batches.list_files,
        "List files of the tenant; pages by `limit` and `after`",
    ),
    _get("/v1/files/{file_id}", lambda on: on.batches.show_file, "Show a file"),
    _get("/v1/files/{file_id}/content", lambda on: on.batches.content, "Download a file"),
    Route("DELETE", "/v1/files/{file_id}", lambda on: on.batches.delete_file, "Delete a file"),
    Route("POST", "/v1/batches", lambda on: on.batches.create, "Start a batch", CreateBatchRequest),
    _get(
        "/v1/batches",
        lambda on: on.batches.list,
        "List batches of the tenant; pages by `limit` and `after`",
    ),
    _get("/v1/batches/{batch_id}", lambda on: on.batches.show, "Show a batch"),
    Route("POST", "/v1/batches/{batch_id}/cancel", lambda on: on.batches.cancel, "Cancel a batch"),
    _adapters(
        "/v1/load_lora_adapter",
        LoadAdapterRequest,
        lambda on: on.models.load_adapter,
        "Load an adapter (admin)",
    ),
    _adapters(
        "/v1/unload_lora_adapter",
        UnloadAdapterRequest,
        lambda on: on.models.unload_adapter,
        "Unload an adapter (admin)",
    ),
    _weights("/pause", lambda on: on.weights.pause, "Pause a model", PauseBody),
    _weights("/pause_generation", lambda on: on.weights.pause, "Same as `/pause`", PauseBody),
    _weights("/resume", lambda on: on.weights.resume, "End a pause", PauseBody),
    _weights("/continue_generation", lambda on: on.weights.resume, "Same as `/resume`", PauseBody),
    _weights("/is_paused", lambda on: on.weights.is_paused, "True during a pause", method="GET"),
    _weights(
        "/update_weights",
        lambda on: on.weights.update,
        "Replace the weights of a model on all its workers",
        UpdateWeightsBody,
    ),
    _weights(
        "/update_weights_from_disk",
        lambda on: on.weights.update,
        "Same as `/update_weights`",
        UpdateWeightsBody,
    ),
    _weights(
        "/collective_rpc",
        lambda on: on.weights.collective_rpc,
        "`reload_weights`: as `/update_weights`",
        CollectiveRpcBody,
    ),
    _weights("/weight_info", lambda on: on.weights.info, "The served weights", method="GET"),
    _weights("/model_info", lambda on: on.weights.info, "Same as `/weight_info`", method="GET"),
    _weights(
        "/get_world_size", lambda on: on.weights.world_size, "Number of workers", method="GET"
    ),
    _weights(
        "/v1/rl/workers",
        lambda on: on.weights.workers,
        "The workers and their weights, in Dynamo's form",
        method="GET",
    ),
    _weights("/is_sleeping", lambda on: on.weights.is_sleeping, "Always false", method="GET"),
    *(
        _weights(path, lambda on: on.weights.flushed, "Confirms that no KV of old weights is used")
        for path in FLUSH_PATHS
    ),
    _weights("/flush_cache", lambda on: on.weights.flushed, "Same as with POST", method="GET"),
    _weights(
        "/get_weight_version", lambda on: on.weights.info, "Same as `/weight_info`", method="GET"
    ),
    *(_weights(path, lambda on: on.weights.refuse, "Refused") for path in REFUSED_PATHS),
    _public("/", lambda on: on.status.root, "Links to `/docs` and `/console`"),
    _public("/health", lambda on: on.status.health, "Liveness: the router runs"),
    _public("/ping", lambda on: on.status.health, "Same as `/health`"),
    _public("/ping", lambda on: on.status.health, "Same as `/health`", "POST"),
    _public("/load", lambda on: on.status.load, "Number of open requests, as `server_load`"),
    _public("/ready", lambda on: on.status.ready, "Readiness: every model can be served now"),
    _public("/health_generate", lambda on: on.status.ready, "Same as `/ready`"),
    _public("/version", lambda on: on.status.version, "Version of the router"),
    _public("/metrics", lambda on: on.status.metrics, "[Metrics](metrics.md) for Prometheus"),
    _public("/openapi.json", lambda on: on.status.openapi, "This API for programs"),
    _public("/docs", lambda on: on.status.docs, "This API for a browser"),
    _console("GET", "/console"),
    _console("GET", "/console/{path}"),
    _console("POST", "/console/{path}"),
)
LINES = {x.path: x.line for x in ROUTES if x.line is not None}


async def answer_line(
    handlers: Handlers, endpoint: str, data: bytes, tenant: str, timeout_s: float
) -> AnsweredLine:
    """Answer the body of a batch line. Raises PdserveError."""
    return await LINES[endpoint](handlers)(data, tenant, timeout_s)
