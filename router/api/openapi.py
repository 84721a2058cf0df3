"""The OpenAPI document of the HTTP API, made from the structs of bodies."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from pdserve import __version__
from router.api.batches import CreateBatchRequest
from router.api.bodies import GenerateBody
from router.api.messages import CountTokensRequest, MessageBody, MessageError, MessagesRequest
from router.api.openai import (
    ChatRequest,
    CompletionRequest,
    ErrorBody,
    LoadAdapterRequest,
    Response,
    UnloadAdapterRequest,
)
from router.api.pooling import EmbeddingsRequest, RerankRequest, ScoreRequest
from router.api.responses import ResponseBody, ResponsesRequest
from router.api.tokens import DetokenizeRequest, TokenizeRequest

if TYPE_CHECKING:
    from router.api.bodies import Body

DOCS_PAGE = Path(__file__).with_name("docs.html")


class Endpoint(NamedTuple):
    method: str
    path: str
    text: str
    body: type[Body] | None = None


ENDPOINTS = (
    Endpoint("POST", "/v1/chat/completions", "OpenAI's chat; streamed or whole", ChatRequest),
    Endpoint("POST", "/v1/completions", "OpenAI's completions", CompletionRequest),
    Endpoint("POST", "/v1/responses", "OpenAI's Responses", ResponsesRequest),
    Endpoint("GET", "/v1/responses/{response_id}", "A stored response"),
    Endpoint("DELETE", "/v1/responses/{response_id}", "Delete it"),
    Endpoint("POST", "/v1/messages", "Anthropic's Messages", MessagesRequest),
    Endpoint("POST", "/v1/messages/count_tokens", "Tokens of a conversation", CountTokensRequest),
    Endpoint("POST", "/v1/embeddings", "Embeddings, of pooling workers", EmbeddingsRequest),
    Endpoint("POST", "/v1/score", "Scores of pairs of texts", ScoreRequest),
    Endpoint("POST", "/v1/rerank", "Documents by their score for a query", RerankRequest),
    Endpoint("POST", "/tokenize", "Token ids of a text or a conversation", TokenizeRequest),
    Endpoint("POST", "/detokenize", "Text of token ids", DetokenizeRequest),
    Endpoint("GET", "/tokenizer_info", "The tokenizer's configuration and chat template"),
    Endpoint("GET", "/v1/models", "Models and LoRA adapters"),
    Endpoint("GET", "/v1/models/{model}", "One of them"),
    Endpoint("POST", "/v1/files", "Upload one: multipart, with `file` and `purpose=batch`"),
    Endpoint("GET", "/v1/files", "Files of the tenant; pages by `limit` and `after`"),
    Endpoint("GET", "/v1/files/{file_id}", "One of them"),
    Endpoint("GET", "/v1/files/{file_id}/content", "Its bytes"),
    Endpoint("DELETE", "/v1/files/{file_id}", "Delete it"),
    Endpoint("POST", "/v1/batches", "Start a batch", CreateBatchRequest),
    Endpoint("GET", "/v1/batches", "Batches of the tenant; pages by `limit` and `after`"),
    Endpoint("GET", "/v1/batches/{batch_id}", "One of them"),
    Endpoint("POST", "/v1/batches/{batch_id}/cancel", "End it early"),
    Endpoint("POST", "/v1/load_lora_adapter", "Load an adapter (admin)", LoadAdapterRequest),
    Endpoint("POST", "/v1/unload_lora_adapter", "Unload it (admin)", UnloadAdapterRequest),
    Endpoint("GET", "/health", "The router runs"),
    Endpoint("GET", "/ping", "The same"),
    Endpoint("GET", "/ready", "Every model can be served now"),
    Endpoint("GET", "/version", "Version of the router"),
    Endpoint("GET", "/metrics", "[Metrics](metrics.md) for Prometheus"),
    Endpoint("GET", "/openapi.json", "This API for programs"),
    Endpoint("GET", "/docs", "This API for a browser"),
)
# Paths with a body of JSON, and those that need no more than to be asked.
POSTS = {x.path: x.body for x in ENDPOINTS if x.body is not None}
GETS = tuple(
    x.path
    for x in ENDPOINTS
    if x.method == "GET" and "{" not in x.path and x.path not in ("/v1/files", "/v1/batches")
)


def openapi() -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of the HTTP API."""
    (*bodies, answer, response, message, error, message_error), schemas = (
        msgspec.json.schema_components(
            (*POSTS.values(), Response, ResponseBody, MessageBody, ErrorBody, MessageError),
            ref_template="#/components/schemas/{name}",
        )
    )

    def responses(failed: Any = error, **content: Any) -> dict[str, Any]:
        failure = {"description": "Error.", "content": {"application/json": {"schema": failed}}}
        return {"200": {"description": "Success.", **content}, "default": failure}

    paths: dict[str, Any] = {path: {"get": {"responses": responses()}} for path in GETS}
    for path, body in zip(POSTS, bodies, strict=True):
        failed, schema = error, response if path == "/v1/responses" else answer
        if path.startswith("/v1/messages"):
            failed, schema = message_error, message
        content: dict[str, Any]
        if issubclass(POSTS[path], GenerateBody) and not path.endswith("count_tokens"):
            content = {"application/json": {"schema": schema}, "text/event-stream": {}}
        elif path.endswith("_adapter"):
            content = {"text/plain": {}}
        else:
            content = {"application/json": {}}
        paths[path] = {
            "post": {
                "requestBody": {
                    "required": True,
                    "content": {"application/json": {"schema": body}},
                },
                "security": [{}, {"key": []}],
                "responses": responses(failed, content=content),
            }
        }
    keys = {"key": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "pdserve", "version": __version__},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": keys},
    }
