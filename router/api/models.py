"""Endpoints of models and LoRA adapters."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

from aiohttp import web
from msgspec import Meta

from pdserve.errors import ModelNotFound
from router.api.dialects.fields import Body, Text, read
from router.api.handling import json_response, read_body
from router.request.answer import served

if TYPE_CHECKING:
    from pdserve.types import Adapter, ModelInfo
    from router.operations.adapters import Adapters
    from router.request.answer import Generates


class LoadAdapterRequest(Body):
    """Body of POST /v1/load_lora_adapter."""

    lora_name: Annotated[Text, Meta(description="Name that requests give as `model`.")]
    lora_path: Annotated[Text, Meta(description="Directory on the workers' machines.")]
    load_inplace: Annotated[
        bool, Meta(description="Replace the adapter that is served under this name.")
    ] = False
    model: Annotated[str, Meta(description="The adapter's model, if several are served.")] = ""


class UnloadAdapterRequest(Body):
    """Body of POST /v1/unload_lora_adapter."""

    lora_name: Text


class ModelsApi:
    """Handlers. The `created` time of all models is the start of the router."""

    def __init__(self, generator: Generates, adapters: Adapters) -> None:
        self._generator = generator
        self._adapters = adapters
        self._started = int(time.time())

    async def list(self, _: web.BaseRequest) -> web.Response:
        cards = [self._card(name, *x) for name, x in served(self._generator).items()]
        return json_response({"object": "list", "data": cards})

    async def show(self, _: web.BaseRequest, name: str) -> web.Response:
        found = served(self._generator).get(name)
        if found is None:
            raise ModelNotFound(f"model {name!r} is not served", field="model")
        return json_response(self._card(name, *found))

    def _card(self, name: str, model: ModelInfo, adapter: Adapter | None) -> dict[str, object]:
        return {
            "id": name,
            "object": "model",
            "created": self._started,
            "owned_by": "pdserve",
            **({} if adapter is None else {"parent": model.name}),
            # Not in OpenAI's API: clients need these to build prompts of token ids that fit.
            "max_model_len": model.max_model_len,
            "vocab_size": model.vocab_size,
        }

    async def load_adapter(self, request: web.BaseRequest) -> web.Response:
        body = read(LoadAdapterRequest, await read_body(request))
        name = body.lora_name
        await self._adapters.load(name, body.lora_path, model=body.model, replace=body.load_inplace)
        return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")

    async def unload_adapter(self, request: web.BaseRequest) -> web.Response:
        name = read(UnloadAdapterRequest, await read_body(request)).lora_name
        await self._adapters.unload(name)
        return web.Response(text=f"Success: LoRA adapter '{name}' removed successfully.")
