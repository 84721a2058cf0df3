"""gRPC service `pdserve.v1.Peer`: requests of other regions, and what this region can serve."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec import structs

from pdserve.errors import PdserveError, Refusal, Unavailable
from pdserve.net import rpc
from pdserve.v1 import peer_pb2 as p
from pdserve.v1 import worker_pb2 as w
from pdserve.v1.peer_pb2_grpc import PeerServicer
from router.api.grpc import answer_call, write_answer
from router.api.open_requests import ApiCall
from router.attempt.forwarded import request_from_pb
from router.fleet.region_load import load_to_pb

if TYPE_CHECKING:
    import grpc

    from pdserve.types import GenerateRequest
    from router.api.shared import SharedParts
    from router.request_path import RequestPath

    Context = grpc.aio.ServicerContext[Any, Any]

_FORWARD = "/pdserve.v1.Peer/Forward"


class PeerService(PeerServicer):
    """The caller is a router (`pdserve/security/roles.py`): it names the tenant of a request, whose
    key and rules it has checked."""

    def __init__(self, path: RequestPath, shared: SharedParts) -> None:
        self._path, self._fleet = path, path.workers.fleet
        self._intake, self._calls = shared.intake, shared.calls
        self._open_requests = shared.open_requests

    async def Forward(  # type: ignore[override]  # noqa: N802 - see GenerationService.Generate
        self, request: p.ForwardRequest, context: Context
    ) -> None:
        call = ApiCall(
            route=_FORWARD,
            client=str(context.peer()),
            request_id=request.request.request_id,
            model=request.model,
            tenant=request.tenant,
            generates=True,
        )
        await answer_call(self._calls, call, context, self._forward(request, context))

    async def _forward(self, message: p.ForwardRequest, context: Context) -> None:
        with self._open_requests.enter() as open_request:
            made = self._request(message, context.time_remaining())
            # Its router may continue an answer here whose stream has broken.
            key = f"{_FORWARD}/{made.from_region}/{made.request_id}"
            self._open_requests.claim(open_request, made.tenant, key, resumes=True)
            self._path.metrics.count("peer_requests", made.model, made.from_region)
            await write_answer(partial(self._path.server.serve, made), made, context)

    def _request(self, message: p.ForwardRequest, timeout_s: float | None) -> GenerateRequest:
        """Return the request in `message`. Raises InvalidRequest, and Unavailable if another region
        should serve it."""
        own, tenants = self._path.peers.region, self._path.admission.tenants
        model = self._fleet.models().get(message.model)
        reason = ""
        if message.from_region == own:
            reason = (
                f"it is the region that forwards: check router.peers and topology.region ({own})"
            )
        elif tenants.names() and message.tenant not in tenants.names():
            reason = "it does not have the tenant of the request (router.tenants)"
        elif model is None or not self._fleet.of_model(message.model):
            reason = f"it does not serve model {message.model}"
        elif model.tokenizer != message.tokenizer:
            reason = f"its model {message.model} has another tokenizer"
        if reason:
            raise Unavailable(reason)
        adapters = {x.key: x for x in self._path.models.adapters().values()}
        made = request_from_pb(message, adapters, timeout_s)
        if not self._intake.residency.admits(made.tenant, made.regions):
            text, why = "data of the request may not be in it", Refusal.REGION_NOT_ALLOWED
            raise Unavailable(text, reason=why)
        return structs.replace(made, storage=self._intake.residency.storage_of(made.tenant))

    async def GetLoad(  # noqa: N802
        self, request: p.GetLoadRequest, context: Context
    ) -> p.RegionLoad:
        peers = self._path.peers
        is_draining = peers.draining or self._open_requests.is_stopping
        return load_to_pb(peers.region, self._path.load.models(), draining=is_draining)

    async def GetTokenizer(  # noqa: N802
        self, request: p.GetModelTokenizerRequest, context: Context
    ) -> w.TokenizerFiles:
        try:
            if (model := self._fleet.models().get(request.model)) is None:
                raise Unavailable(f"it does not serve model {request.model}")
            files = (await self._intake.tokenizer(model)).files
        except PdserveError as error:
            await rpc.abort(context, error)
        return w.TokenizerFiles(files=files)
