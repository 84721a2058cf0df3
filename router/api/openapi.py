"""The OpenAPI document of the HTTP API, made from the structs of bodies."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from pdserve import __version__
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
from router.api.responses import ResponseBody, ResponsesRequest
from router.api.tokens import DetokenizeRequest, TokenizeRequest

if TYPE_CHECKING:
    from router.api.bodies import Body

DOCS_PAGE = Path(__file__).with_name("docs.html")
# Paths with a body, in the order of the document.
POSTS: dict[str, type[Body]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountTokensRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
    "/v1/load_lora_adapter": LoadAdapterRequest,
    "/v1/unload_lora_adapter": UnloadAdapterRequest,
}
GETS = (
    *("/v1/models", "/health", "/ping", "/ready", "/version", "/metrics", "/openapi.json", "/docs"),
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
