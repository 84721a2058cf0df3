"""The tokenizers of the models, fetched from workers, because a router has no model files.

Workers register with a digest of the tokenizer's files. A worker whose tokenizer or chat template
differs from its model's is refused at registration, and a tokenizer is fetched only once.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from pdserve.errors import ConfigError, PdserveError, Unavailable
from pdserve.model.tokenizer import Tokenizer, digest_of
from pdserve.v1 import worker_pb2 as w
from router.control.worker_rpc import worker_stub
from router.intake.tokenise import NoTokenizer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Mapping

    from pdserve.net.rpc import Dialer
    from pdserve.types import ModelInfo
    from router.fleet.member import Member
    from router.fleet.peers import RegionPeers
    from router.fleet.registry import Fleet

logger = logging.getLogger(__name__)

FETCH_TIMEOUT_S = 10.0


class Tokenizers:
    """State: the tokenizers of served models by digest, loaded or being loaded."""

    def __init__(
        self,
        models: Callable[[], Mapping[str, ModelInfo]],
        load: Callable[[ModelInfo], Coroutine[Any, Any, Tokenizer]],
    ) -> None:
        """`load` loads the tokenizer of a model, once, when the first request needs it."""
        self._models, self._load = models, load
        self._tasks: dict[str, asyncio.Task[Tokenizer]] = {}
        self._preloaded: set[str] = set()

    def loaded(self, model: ModelInfo) -> Tokenizer | None:
        """Return the model's tokenizer if it is loaded."""
        task = self._tasks.get(model.tokenizer)
        if task is None or not task.done() or task.cancelled() or task.exception():
            return None
        return task.result()

    async def get(self, model: ModelInfo) -> Tokenizer:
        """Return the model's tokenizer. Raises NoTokenizer if it cannot be loaded; the next request
        tries again."""
        task = self._tasks.get(model.tokenizer)
        if task is None:
            served = {each.tokenizer for each in self._models().values()}
            self._tasks = {x: kept for x, kept in self._tasks.items() if x in served}
            task = self._tasks[model.tokenizer] = asyncio.create_task(self._load(model))
        try:
            # Shielded: a client that leaves must not cancel a load that other requests wait for.
            return task.result() if task.done() else await asyncio.shield(task)
        except (ConfigError, Unavailable) as error:
            self._tasks.pop(model.tokenizer, None)
            logger.error("tokenizer of model %s: %s", model.name, error)
            raise NoTokenizer(model) from error

    async def preload(self) -> None:
        """Load the tokenizers of models that have appeared, so that their first requests need not
        wait. After a failure the first request tries again."""
        for model in list(self._models().values()):
            if model.tokenizer and model.tokenizer not in self._preloaded:
                self._preloaded.add(model.tokenizer)
                with suppress(NoTokenizer):
                    await self.get(model)


async def fetch_tokenizer(
    fleet: Fleet, dialer: Dialer, peers: RegionPeers, model: ModelInfo
) -> Tokenizer:
    """Return the tokenizer of the first worker that sends it, else of another region. Raises
    Unavailable with the last failure, and ConfigError if the files are no valid tokenizer."""
    if not model.tokenizer:
        raise ConfigError("its workers have none that a router can use", field="model")
    failure = "no worker is there"
    members = (*fleet.of_model(model.name), *fleet.pooling(model.name))
    senders: list[tuple[str, Callable[[], Awaitable[Mapping[str, bytes]]]]] = [
        (f"worker {x.worker_id}", partial(_of_worker, dialer, x)) for x in members if not x.lost
    ]
    for region, peer in peers.by_region.items():
        senders.append((f"region {region}", partial(peer.tokenizer_files, model.name)))
    for sender, fetch in senders:
        try:
            files = await fetch()
        except PdserveError as error:
            failure = error.message
            continue
        if (found := digest_of(files)) == model.tokenizer:
            # Loading takes long enough to delay the tokens of all streams.
            return await asyncio.to_thread(Tokenizer.load, files)
        failure = (
            f"{sender}: the files of its tokenizer have changed: digest {found}, "
            f"registered with {model.tokenizer}"
        )
    raise Unavailable(failure)


async def _of_worker(dialer: Dialer, member: Member) -> Mapping[str, bytes]:
    async with worker_stub(dialer, member) as stub:
        answer = await stub.GetTokenizer(
            w.GetTokenizerRequest(), timeout=FETCH_TIMEOUT_S, metadata=dialer.metadata
        )
    return answer.files
