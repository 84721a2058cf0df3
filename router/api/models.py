"""Endpoints of models and LoRA adapters."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

from aiohttp import web
from msgspec import Meta

from pdserve.errors import ModelNotFound
from router.api.audit import http_caller
from router.api.http_request import is_anthropic, json_response, read_body
from router.attempt.answer import served
from router.dialects.fields import Body, Text, read

if TYPE_CHECKING:
    from pdserve.types import Adapter, ModelInfo
    from router.api.shared import SharedParts
    from router.attempt.answer import Models
    from router.control.adapters import Adapters


# Clients of OpenAI's first models read it, and vLLM still has it.
_PERMISSION = {
    "object": "model_permission",
    "organization": "*",
    "group": None,
    "is_blocking": False,
    **dict.fromkeys(("allow_sampling", "allow_logprobs", "allow_view"), True),
    **dict.fromkeys(("allow_create_engine", "allow_search_indices", "allow_fine_tuning"), False),
}


class LoadAdapterRequest(Body):
    """Body of POST /v1/load_lora_adapter."""

    lora_name: Annotated[Text, Meta(description="Name that requests give as `model`.")]
    lora_path: Annotated[Text, Meta(description="Directory on the workers' machines.")]
    load_inplace: Annotated[
        bool | None, Meta(description="Replace the adapter that is served under this name.")
    ] = None
    model: Annotated[
        str | None, Meta(description="The adapter's model, if several are served.")
    ] = None


class UnloadAdapterRequest(Body):
    """Body of POST /v1/unload_lora_adapter."""

    lora_name: Text


class ModelsApi:
    """Handlers. The `created` time of all models is the start of the router."""

    def __init__(self, models: Models, adapters: Adapters, shared: SharedParts) -> None:
        self._models = models
        self._audit, self._chooser = shared.audit, shared.chooser
        self._adapters = adapters
        self._started = int(time.time())

    async def list(self, request: web.BaseRequest) -> web.Response:
        found = self._listed(is_anthropic=is_anthropic(request))
        if is_anthropic(request):
            names: list[str | None] = [*found] or [None]
            ends = {"first_id": names[0], "last_id": names[-1]}
            return json_response({"data": [*found.values()], "has_more": False, **ends})
        return json_response({"object": "list", "data": [*found.values()]})

    async def show(self, request: web.BaseRequest, name: str) -> web.Response:
        found = self._listed(is_anthropic=is_anthropic(request)).get(name)
        if found is None:
            raise ModelNotFound(f"model {name!r} is not served", field="model")
        return json_response(found)

    def _listed(self, *, is_anthropic: bool) -> dict[str, dict[str, object]]:
        """Return all models and adapters, then the virtual models, by name."""
        models, virtual = served(self._models), dict(self._chooser.virtual_models())
        if is_anthropic:
            lengths = {name: model.max_model_len for name, (model, _) in models.items()}
            return {name: self._info(name, x) for name, x in (lengths | virtual).items()}
        cards = {name: self._card(name, *x) for name, x in models.items()}
        for name, length in virtual.items():
            card = self._card_of(name, name, None)
            cards[name] = {**card, "max_model_len": length}
        return cards

    def _info(self, name: str, max_model_len: int) -> dict[str, object]:
        """Return a model in the form of Anthropic's API."""
        return {
            "type": "model",
            "id": name,
            "display_name": name,
            "created_at": datetime.fromtimestamp(self._started, UTC).isoformat(),
            "lifecycle": "active",
            "max_input_tokens": max_model_len,
            "max_tokens": max_model_len,
        }

    def _card(self, name: str, model: ModelInfo, adapter: Adapter | None) -> dict[str, object]:
        return {
            **self._card_of(name, model.name, None if adapter is None else model.name),
            # Not in OpenAI's API: clients need these to build prompts of token ids that fit.
            "max_model_len": model.max_model_len,
            "vocab_size": model.vocab_size,
        }

    def _card_of(self, name: str, root: str, parent: str | None) -> dict[str, object]:
        return {
            "id": name,
            "object": "model",
            "created": self._started,
            "owned_by": "pdserve",
            "root": root,
            "parent": parent,
            "permission": [{**_PERMISSION, "id": f"modelperm-{name}", "created": self._started}],
        }

    async def load_adapter(self, request: web.BaseRequest) -> web.Response:
        body = read(LoadAdapterRequest, await read_body(request))
        name = body.lora_name
        path, replace = body.lora_path, bool(body.load_inplace)
        with self._audit.action(
            http_caller(request), "load_adapter", adapter=name, path=path, replace=replace
        ):
            await self._adapters.load(name, path, model=body.model or "", replace=replace)
        return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")

    async def unload_adapter(self, request: web.BaseRequest) -> web.Response:
        name = read(UnloadAdapterRequest, await read_body(request)).lora_name
        with self._audit.action(http_caller(request), "unload_adapter", adapter=name):
            await self._adapters.unload(name)
        return web.Response(text=f"Success: LoRA adapter '{name}' removed successfully.")
