"""Endpoints with which trainers replace the weights of a served model, under the names of vLLM
(vllm/entrypoints/rl/online/api_router.py, 0.32) and of SGLang (srt/entrypoints/http_server.py,
0.5.23). One call does for all workers of the model what it does there for one engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta

from pdserve.errors import InvalidRequest, PermissionDenied, UnsupportedField
from router.api.audit import http_caller
from router.api.http_request import json_response, read_body
from router.dialects.fields import Body, Known, Strict, Text, knows, read

if TYPE_CHECKING:
    from aiohttp import web

    from pdserve.observe.audit import AuditLog
    from router.control.weights import WeightUpdates
    from router.fleet.registry import Fleet

# SGLang's modes. Both continue the open answers after the update.
_SGLANG_MODES = {"abort": "abort", "retract": "keep", "in_place": "keep"}
_REFUSED = {
    "/init_weight_transfer_engine": "weights come from a directory: use /update_weights",
    "/init_weights_update_group": "weights come from a directory: use /update_weights_from_disk",
    "/update_weights_from_tensor": "weights come from a directory: use /update_weights_from_disk",
    "/update_weight_version": "a version is given with its weights: see /update_weights",
    "/weight_checker": "each update compares the tensors, and the digests of all workers",
    "/sleep": "stop the workers instead (router.scale)",
    "/release_memory_occupation": "stop the workers instead (router.scale)",
}


_Model = Annotated[str | None, Meta(description="The model, if several are served.")]
_TimeoutS = Annotated[
    float | None, Meta(description="Seconds for open answers to end, with the mode `wait`.")
]


# Fields of SGLang that change nothing here.
KNOWN_OF_PAUSES = {"torch_empty_cache": Known((True, False))}
KNOWN_OF_UPDATES = {
    **KNOWN_OF_PAUSES,
    "is_async": Known((False,)),
    "load_format": Known(("auto", "safetensors")),
    "recapture_cuda_graph": Known((False,)),
    "token_step": Known((0,)),
}


@knows(KNOWN_OF_PAUSES)
class PauseBody(Body):
    """Body of POST /pause and /pause_generation. The mode may also be in the query."""

    model: _Model = None
    mode: Annotated[
        str | None,
        Meta(description="`wait`, `abort` or `keep`, and SGLang's `retract` and `in_place`."),
    ] = None
    timeout_s: _TimeoutS = None


class UpdateInfo(Strict):
    """Where the weights are."""

    weights_path: Text


@knows(KNOWN_OF_UPDATES)
class UpdateWeightsBody(Body):
    """Body of POST /update_weights and /update_weights_from_disk. One of the three names of the
    directory is required."""

    model: _Model = None
    weight_dir: Annotated[str | None, Meta(description="Directory with the weights.")] = None
    model_path: Annotated[str | None, Meta(description="SGLang's name of it.")] = None
    update_info: UpdateInfo | None = None
    weight_version: Annotated[str | None, Meta(description="Name of these weights.")] = None
    mode: Annotated[str | None, Meta(description="As in /pause, unless it is paused.")] = None
    timeout_s: _TimeoutS = None
    abort_all_requests: Annotated[bool | None, Meta(description="The mode `abort`.")] = None
    flush_cache: Annotated[
        bool | None, Meta(description="Always done: KV of other weights is never used.")
    ] = None
    keep_pause: Annotated[bool | None, Meta(description="A paused model stays paused.")] = None


class CollectiveRpcBody(Body):
    """Body of POST /collective_rpc, of which `reload_weights` is served."""

    method: Text
    args: list[Any] | None = None
    kwargs: dict[str, Any] | None = None
    timeout: float | None = None


class WeightsApi:
    """Handlers. Off unless `router.weights.directories` names a directory."""

    def __init__(
        self, weights: WeightUpdates, fleet: Fleet, audit: AuditLog, *, is_on: bool
    ) -> None:
        self._weights, self._fleet, self._audit, self._is_on = weights, fleet, audit, is_on

    async def pause(self, request: web.BaseRequest) -> web.Response:
        body = await self._read(PauseBody, request)
        mode = body.mode or request.query.get("mode", "")
        model, mode = self._model(body.model), _SGLANG_MODES.get(mode, mode)
        with self._audit.action(http_caller(request), "pause", model=model, mode=mode):
            await self._weights.pause(model, mode, body.timeout_s or 0.0)
        return json_response({"status": "paused"})

    async def resume(self, request: web.BaseRequest) -> web.Response:
        model = self._model((await self._read(PauseBody, request)).model)
        with self._audit.action(http_caller(request), "resume", model=model):
            await self._weights.resume(model)
        return json_response({"status": "resumed"})

    async def is_paused(self, request: web.BaseRequest) -> web.Response:
        model = self._model(request.query.get("model", ""))
        return json_response({"is_paused": self._weights.is_paused(model)})

    async def update(self, request: web.BaseRequest) -> web.Response:
        body = await self._read(UpdateWeightsBody, request)
        path = body.weight_dir or body.model_path
        if not path and body.update_info is not None:
            path = body.update_info.weights_path
        mode = "abort" if body.abort_all_requests else body.mode
        return await self._update(
            request, body.model, path, body.weight_version, mode, body.timeout_s
        )

    async def collective_rpc(self, request: web.BaseRequest) -> web.Response:
        body = await self._read(CollectiveRpcBody, request)
        path = (body.kwargs or {}).get("weights_path") or next(iter(body.args or ()), "")
        if body.method != "reload_weights" or not isinstance(path, str):
            text = "only reload_weights with weights_path can be called"
            raise UnsupportedField(text, field="method")
        return await self._update(request, None, path)

    async def _update(
        self,
        request: web.BaseRequest,
        model: str | None,
        path: str | None,
        version: str | None = None,
        mode: str | None = None,
        timeout_s: float | None = None,
    ) -> web.Response:
        if not path:
            raise InvalidRequest("'weight_dir' is required", field="weight_dir")
        model = self._model(model)
        details = {"model": model, "path": path, "version": version}
        with self._audit.action(http_caller(request), "update_weights", **details) as line:
            done = await self._weights.update(
                model, path, version or "", mode or "", timeout_s or 0.0
            )
            line["version"] = done.version
        # `success` and `message` are SGLang's.
        message = f"weights {done.version} are served"
        return json_response({"success": True, "message": message, "weight_version": done.version})

    async def info(self, request: web.BaseRequest) -> web.Response:
        model = self._model(request.query.get("model", ""))
        weights = self._fleet.weights_of(model)
        start = self._fleet.models()[model].path
        return json_response(
            {
                "model": model,
                "model_path": weights.path or start,
                "weight_version": weights.version or "default",
                "updates": weights.sequence,
                "digest": weights.digest,
                "laggards": self._weights.laggards(model),
            }
        )

    async def world_size(self, request: web.BaseRequest) -> web.Response:
        model = self._model(request.query.get("model", ""))
        ready = [m for m in self._fleet.of_model(model) if not m.lost]
        return json_response({"world_size": len(ready)})

    async def workers(self, request: web.BaseRequest) -> web.Response:
        """List the workers in the form of Dynamo's GET /v1/rl/workers."""
        self._check_on()
        found = [
            {
                "worker_id": m.worker_id,
                "role": m.info.role.value,
                "model": m.info.model.name,
                "state": m.state.value,
                "weight_version": m.reported.weights.version or "default",
                # It answers trainers' calls with `worker.trainer_calls`.
                "address": m.info.debug_address,
            }
            for m in self._fleet.members.values()
            if not m.lost
        ]
        return json_response({"workers": found})

    async def flushed(self, request: web.BaseRequest) -> web.Response:
        """Confirm what holds at all times: cached KV of other weights is never used."""
        self._check_on()
        return json_response({"success": True, "message": "KV of other weights is never used"})

    async def is_sleeping(self, request: web.BaseRequest) -> web.Response:
        self._check_on()
        return json_response({"is_sleeping": False})

    async def refuse(self, request: web.BaseRequest) -> web.Response:
        self._check_on()
        raise UnsupportedField(_REFUSED[request.path], field=request.path.lstrip("/"))

    async def _read(self, body: type[Any], request: web.BaseRequest) -> Any:
        self._check_on()
        data = await read_body(request) if request.body_exists else b""
        return read(body, data or b"{}")

    def _check_on(self) -> None:
        if not self._is_on:
            text = "weights cannot be changed: router.weights.directories is empty"
            raise PermissionDenied(text, field="router.weights.directories")

    def _model(self, name: str | None) -> str:
        """Return the first name of a model; without a `name`, of the only one. Raises
        InvalidRequest."""
        self._check_on()
        return self._weights.model_named(name or "")


REFUSED_PATHS = tuple(_REFUSED)
FLUSH_PATHS = ("/flush_cache", "/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache")
