"""The routers of other regions: what each can serve, by polling, and the connections to them."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import grpc.aio

from pdserve import wire
from pdserve.background import background
from pdserve.net import rpc
from pdserve.net.rpc import PLAIN
from pdserve.security.files import FileTokens
from pdserve.security.tls import dialer
from pdserve.v1 import peer_pb2 as p
from pdserve.v1.peer_pb2_grpc import PeerStub
from router.placement.peers import ModelLoad, PeerView

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from pdserve.config import PeerConfig, RouterConfig
    from pdserve.net.rpc import Dialer
    from pdserve.types import GenerateRequest, ModelInfo
    from pdserve.v1.peer_pb2_grpc import PeerAsyncStub

logger = logging.getLogger(__name__)

POLL_S = 1.0
TOKENIZER_TIMEOUT_S = 10.0
# Without an answer for so long, a region gets no requests, and the ones there continue elsewhere.
STALE_S = 3.0
# Weight of the last round trip in the mean.
_DELAY_WEIGHT = 0.2


class Peer:
    """One other region. `lost` is set while it does not answer."""

    def __init__(self, config: PeerConfig, channel: grpc.aio.Channel, dialer: Dialer) -> None:
        self.config, self._dialer = config, dialer
        self.stub: PeerAsyncStub = PeerStub(channel)
        self.lost = asyncio.Event()
        self.lost.set()
        self._reason = "it has not answered yet"
        self._models: Mapping[str, ModelLoad] = {}
        self._sent = Counter[str]()
        self._delay_s = config.delay_s
        self._now = asyncio.get_running_loop().time
        self._heard_at = self._now()

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The credentials of a call."""
        return self._dialer.metadata

    def view(self) -> PeerView:
        return PeerView(
            self.config.region,
            self.config.address,
            self._reason,
            self._delay_s,
            self._models,
            self._sent,
            self.config.spill_over,
        )

    def sends(self, request: GenerateRequest) -> None:
        """Count a prompt until the region's next load has it."""
        self._sent[request.model] += len(request.prompt_token_ids)

    async def tokenizer_files(self, model: str) -> Mapping[str, bytes]:
        """Return the files of the tokenizer of a model. Raises PdserveError."""
        request = p.GetModelTokenizerRequest(model=model)
        try:
            answer = await self.stub.GetTokenizer(
                request, timeout=TOKENIZER_TIMEOUT_S, metadata=self.metadata
            )
        except grpc.aio.AioRpcError as error:
            found = rpc.error_from_rpc(error)
            found.message = f"region {self.config.region}: {found.message}"
            raise found from error
        return answer.files

    async def watch(self) -> None:
        """Poll the region until cancelled."""
        while True:
            began = self._now()
            try:
                load = await self.stub.GetLoad(
                    p.GetLoadRequest(), timeout=STALE_S / 2, metadata=self.metadata
                )
            except grpc.aio.AioRpcError as error:
                self._failed(rpc.error_from_rpc(error).message)
            else:
                self._heard(load, self._now() - began)
            await asyncio.sleep(max(0.0, began + POLL_S - self._now()))

    def _heard(self, load: p.RegionLoad, took_s: float) -> None:
        region, before = self.config.region, self._reason
        self._heard_at, self._reason = self._now(), ""
        if load.region != region:
            self._reason = f"the router there is in region {load.region or '(none)'}"
        elif load.draining:
            self._reason = "it drains"
        if not self.config.delay_s:
            mean_s = self._delay_s or took_s
            self._delay_s = mean_s + _DELAY_WEIGHT * (took_s - mean_s)
        self._models = _models_from_pb(load)
        self._sent.clear()
        self.lost.clear()
        self._log(before)

    def _failed(self, message: str) -> None:
        before, self._reason = self._reason, f"it does not answer: {message}"
        if self._now() - self._heard_at >= STALE_S:
            self.lost.set()
        self._log(before)

    def _log(self, before: str) -> None:
        if bool(before) != bool(self._reason):
            logger.info("region %s: %s", self.config.region, self._reason or "takes requests")


def _models_from_pb(message: p.RegionLoad) -> dict[str, ModelLoad]:
    """Return the models in `message` by name."""
    return {
        x.info.name: ModelLoad(
            wire.model_from_pb(x.info),
            x.workers,
            dict(sorted(x.ttft_s.items())),
            frozenset(x.adapters),
            x.weights,
        )
        for x in message.models
    }


class RegionPeers:
    """The other regions, in the order of the configuration. `region`: of this router. `draining`:
    it forwards all new requests."""

    def __init__(self, region: str, peers: Sequence[Peer] = ()) -> None:
        self.region, self.draining = region, False
        self.by_region = {x.config.region: x for x in peers}

    def views(self) -> list[PeerView]:
        return [x.view() for x in self.by_region.values()]

    def models(self) -> dict[str, ModelInfo]:
        """The models of the other regions by name, those of the first region that has one."""
        found: dict[str, ModelInfo] = {}
        for view in self.views():
            if not view.reason:
                found = {x: load.info for x, load in view.models.items()} | found
        return found


@asynccontextmanager
async def open_peers(config: RouterConfig) -> AsyncIterator[RegionPeers]:
    """Watch the other regions for the context."""
    async with AsyncExitStack() as stack:
        to_peers = dialer(config.access) if config.peers else PLAIN
        tokens = config.access.peer_token_file
        if config.peers:
            file = FileTokens(tokens, "access.peer_token_file") if tokens else None
            to_peers = replace(to_peers, file_tokens=file)
        found = []
        for peer in config.peers:
            named = replace(to_peers, peer_name=peer.tls_name or to_peers.peer_name)
            channel = await stack.enter_async_context(named.open_channel(peer.address))
            found.append(Peer(peer, channel, named))
            await stack.enter_async_context(background(f"region-{peer.region}", found[-1].watch))
        yield RegionPeers(config.topology.region, found)
