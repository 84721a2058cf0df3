"""Our own OpenAPI document (spec.openapis.org/oas/v3.1.0), made of the tables that requests are
checked by."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pdserve import __version__
from router.http.fields import CHAT, COMPLETIONS, Treatment

if TYPE_CHECKING:
    from collections.abc import Mapping

    from router.http.fields import Rule

_REQUIRED = {"chat": ["model", "messages"], "completions": ["model", "prompt"]}
_ERROR: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
                "reason": {"type": "string"},
            },
        }
    },
}


def document() -> dict[str, Any]:
    """What is served, as plain values."""
    posts = {
        "/v1/chat/completions": _post("chat", CHAT),
        "/v1/completions": _post("completions", COMPLETIONS),
    }
    gets = {
        "/v1/models": "The models that are served.",
        "/health": "Whether the router runs.",
        "/ready": "Whether there are workers to serve with.",
        "/metrics": "Prometheus' text.",
        "/openapi.json": "This document.",
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "pdserve", "version": __version__},
        "paths": {**posts, **{path: {"get": _answers(doc)} for path, doc in gets.items()}},
        "components": {
            "schemas": {"Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _post(name: str, rules: Mapping[str, Rule]) -> dict[str, Any]:
    schema = {
        "type": "object",
        "required": _REQUIRED[name],
        "additionalProperties": False,
        "properties": {field: _property(rule) for field, rule in rules.items()},
    }
    body = {"required": True, "content": {"application/json": {"schema": schema}}}
    operation = _answers("An answer, whole or as a stream of events.")
    return {"post": {"requestBody": body, "security": [{}, {"key": []}], **operation}}


def _property(rule: Rule) -> dict[str, Any]:
    match rule.treatment:
        case Treatment.HONOURED:
            return dict(rule.schema)
        case Treatment.WITHOUT_EFFECT:
            return {"description": f"Without effect: {rule.why}."}
        case Treatment.NEUTRAL_ONLY:
            return {"enum": [*rule.neutral, None], "description": f"Not supported: {rule.why}."}


def _answers(summary: str) -> dict[str, Any]:
    reference = {"schema": {"$ref": "#/components/schemas/Error"}}
    error = {"description": "What is wrong.", "content": {"application/json": reference}}
    return {"summary": summary, "responses": {"200": {"description": "Done."}, "default": error}}
