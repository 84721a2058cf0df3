"""The OpenAPI document of the HTTP API, generated from its routes and the structs of bodies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from pdserve import __version__
from router.api.route_table import Credential

if TYPE_CHECKING:
    from collections.abc import Iterable

    from router.api.route_table import Route


def openapi(routes: Iterable[Route]) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of the routes with a JSON body or without parameters."""
    shown = [x for x in routes if x.text and (x.body or (x.method == "GET" and "{" not in x.path))]
    structs = dict.fromkeys(y for x in shown for y in (x.body, x.answer, x.errors) if y)
    found, schemas = msgspec.json.schema_components(
        structs, ref_template="#/components/schemas/{name}"
    )
    schema_of = dict(zip(structs, found, strict=True))
    paths: dict[str, Any] = {}
    for route in shown:
        failure = {"application/json": {"schema": schema_of[route.errors]}}
        success: dict[str, Any] = {"description": "Success."}
        operation: dict[str, Any] = {
            "responses": {"200": success, "default": {"description": "Error.", "content": failure}}
        }
        if route.body is not None:
            answer = {} if route.answer is None else {"schema": schema_of[route.answer]}
            success["content"] = {route.content: answer}
            if route.streams:
                success["content"]["text/event-stream"] = {}
            body = {"application/json": {"schema": schema_of[route.body]}}
            operation["requestBody"] = {"required": True, "content": body}
        if route.credential is not Credential.NONE:
            operation["security"] = [{}, {"key": []}]
        paths.setdefault(route.path, {})[route.method.lower()] = operation
    keys = {"key": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "pdserve", "version": __version__},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": keys},
    }
