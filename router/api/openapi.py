"""The OpenAPI document of the HTTP API, made from the structs of bodies."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from pdserve import __version__
from router.api.openai import (
    ChatRequest,
    CompletionRequest,
    ErrorBody,
    LoadAdapterRequest,
    Response,
    UnloadAdapterRequest,
)
from router.api.tokens import DetokenizeRequest, TokenizeRequest

if TYPE_CHECKING:
    from router.api.bodies import Body

DOCS_PAGE = Path(__file__).with_name("docs.html")
# Paths with a body, in the order of the document.
POSTS: dict[str, type[Body]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
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
    (*bodies, answer, error), schemas = msgspec.json.schema_components(
        (*POSTS.values(), Response, ErrorBody), ref_template="#/components/schemas/{name}"
    )

    def responses(**content: Any) -> dict[str, Any]:
        failure = {"description": "Error.", "content": {"application/json": {"schema": error}}}
        return {"200": {"description": "Success.", **content}, "default": failure}

    paths: dict[str, Any] = {path: {"get": {"responses": responses()}} for path in GETS}
    generated = {"application/json": {"schema": answer}, "text/event-stream": {}}
    for path, body in zip(POSTS, bodies, strict=True):
        content: dict[str, Any] = generated
        if path.endswith("tokenize"):
            content = {"application/json": {}}
        elif path.endswith("_adapter"):
            content = {"text/plain": {}}
        paths[path] = {
            "post": {
                "requestBody": {
                    "required": True,
                    "content": {"application/json": {"schema": body}},
                },
                "security": [{}, {"key": []}],
                "responses": responses(content=content),
            }
        }
    keys = {"key": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "pdserve", "version": __version__},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": keys},
    }
