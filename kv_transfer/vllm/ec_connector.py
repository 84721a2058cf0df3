"""The connector of encoder caches that vLLM loads (`ec_connector_module_path`).

An encode worker encodes the images of a request, and offers the features of each. The prefill
worker fetches them before it schedules the request. Images whose features miss a deadline are
encoded by the prefill worker, so no request fails because of an encode worker.

Fetches run in the scheduler's process. The metadata of a step brings the features that it needs to
the processes that run the model. An encode worker has one process.

A request's `ec_transfer_params`: {"transfer_id": str} for an encode worker; for a prefill worker
also "address", "instance_id" and "row_bytes". In its output, prefill reports how many images it
"wanted" the features of, because its KV cache lacked their KV, and how many it "fetched".

Tried on vLLM 0.32.0 (CPU).
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.ec_transfer.ec_connector.base import (
    ECConnectorBase,
    ECConnectorMetadata,
    ECConnectorRole,
)
from vllm.distributed.ec_transfer.ec_connector.encoder_output_width import get_encoder_output_width

from kv_transfer.image_features import ImageFeaturePlane, ImageFeatureSource
from kv_transfer.settings import read_extra_config
from kv_transfer.vllm.kv_layout import describe_model

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)


@dataclass
class EcStepMetadata(ECConnectorMetadata):  # type: ignore[misc]
    """`wanted`: of requests that enter an encode worker, the transfers of their images, by vLLM's
    identifier. `loads`: features that a prefill worker has fetched, for this step."""

    wanted: dict[str, dict[str, str]] = field(default_factory=dict)
    loads: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass(slots=True)
class _Fetches:
    """The image features of one request. `waiting`: transfers in progress, by vLLM's identifier of
    the image. `unneeded`: numbers of the images that are not fetched. `wanted`, `fetched`: number
    of fetches that were started, and that succeeded."""

    source: ImageFeatureSource
    deadline: float
    waiting: dict[str, str] = field(default_factory=dict)
    unneeded: list[int] = field(default_factory=list)
    wanted: int = 0
    fetched: int = 0


@dataclass(frozen=True, slots=True)
class _Arrived:
    """Features of an image that are not loaded yet. `width`: values in a row."""

    request_id: str
    transfer_id: str
    width: int


class PdEcConnector(ECConnectorBase):  # type: ignore[misc]
    """An encode worker's half in the process that runs its model, or the scheduler's half of either
    role. A prefill worker opens its plane with the first request that fetches."""

    def __init__(self, vllm_config: VllmConfig, role: ECConnectorRole) -> None:
        super().__init__(vllm_config, role)
        config = vllm_config.ec_transfer_config
        self._settings = read_extra_config(config.ec_connector_extra_config)
        self._instance_id: str = config.engine_id
        self._dtype = vllm_config.model_config.dtype
        self._device = vllm_config.device_config.device_type
        self._plane: ImageFeaturePlane | None = None
        self._wanted: dict[str, dict[str, str]] = {}  # by request
        self._known: set[str] = set()  # an encode worker's open requests
        # State of a prefill worker: by request, and by image identifier.
        self._fetches: dict[str, _Fetches] = {}
        self._arrived: dict[str, _Arrived] = {}
        self._loads: dict[str, torch.Tensor] = {}
        if self.is_producer and role is ECConnectorRole.WORKER:
            self._open()

    def _open(self) -> ImageFeaturePlane:
        if self._plane is None:
            layout = describe_model(self._vllm_config) | {"embeddings": str(self._dtype)}
            self._plane = ImageFeaturePlane(
                self._settings, self._instance_id, layout, self._settings.embeddings_bytes
            )
        return self._plane

    # -- for the worker process that hosts the engine

    @property
    def plane(self) -> ImageFeaturePlane:
        assert self._plane is not None, "an encode worker has one from the start"
        return self._plane

    @property
    def row_bytes(self) -> int:
        """Bytes of the features of one token, once an encode worker's model is loaded."""
        width: int = get_encoder_output_width(self._vllm_config, "image")
        return width * int(self._dtype.itemsize)

    def refuse(self, transfer_id: str, images: int) -> None:
        """Notify a prefill worker that the images of a request will not be encoded here."""
        source = ImageFeatureSource(transfer_id, "", "", 0)
        for index in range(images):
            self.plane.refuse(source.transfer_of(index))

    @property
    def waiting_requests(self) -> int:
        """Number of requests that wait for image features."""
        return sum(bool(each.waiting) for each in self._fetches.values())

    def shutdown(self) -> None:
        if self._plane is not None:
            self._plane.close()
            self._plane = None

    # -- an encode worker, where the model runs

    def start_save_caches(self, **kwargs: Any) -> None:
        """Offer the features that earlier steps have encoded for other requests."""
        metadata = self._connector_metadata
        assert isinstance(metadata, EcStepMetadata)
        self._wanted |= metadata.wanted
        encoder_cache = kwargs["encoder_cache"]
        for identifier in {x for items in metadata.wanted.values() for x in items}:
            if identifier in encoder_cache:
                self.save_caches(encoder_cache, identifier)

    def save_caches(
        self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **kwargs: Any
    ) -> None:
        rows = encoder_cache[mm_hash]
        for items in self._wanted.values():
            transfer_id = items.pop(mm_hash, None)
            if transfer_id is None:
                continue
            if rows.dtype != self._dtype:
                logger.warning(
                    "image features are %s, not %s: not offered", rows.dtype, self._dtype
                )
                self.plane.refuse(transfer_id)
                continue
            data: Any = rows.detach().cpu().contiguous().view(torch.uint8).numpy().reshape(-1)
            self.plane.offer(transfer_id, memoryview(data))

    def get_finished(self, finished_req_ids: set[str]) -> tuple[None, None]:
        for request_id in finished_req_ids & self._wanted.keys():
            for transfer_id in self._wanted.pop(request_id).values():
                self.plane.refuse(transfer_id)  # the request was cancelled
        return None, None

    # -- a prefill worker, where the model runs

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: Any) -> None:
        metadata = self._connector_metadata
        assert isinstance(metadata, EcStepMetadata)
        for identifier, rows in metadata.loads.items():
            encoder_cache[identifier] = rows.to(self._device)

    # -- the scheduler, of either role

    def ensure_cache_available(self, request: Request, num_computed_tokens: int) -> bool:
        """Return False while features of a request's images are being fetched. Called in each step
        before a request is scheduled."""
        params = request.ec_transfer_params
        if params is None:
            return True
        request_id = request.request_id
        if self.is_producer:
            if request_id not in self._known:
                self._known.add(request_id)
                source = ImageFeatureSource(params["transfer_id"], "", "", 0)
                transfers = {name: source.transfer_of(n) for name, n, *_ in _images(request)}
                self._wanted[request_id] = transfers
            return True
        fetches = self._fetches.get(request_id)
        if fetches is None:
            fetches = self._fetches[request_id] = self._begin(request, num_computed_tokens)
        if fetches.waiting:
            self._collect()
            if fetches.waiting and time.monotonic() >= fetches.deadline:
                limit_s, count = self._settings.encode_timeout_s, len(fetches.waiting)
                logger.warning(
                    "the features of %d images did not arrive in %g s: computed here",
                    count,
                    limit_s,
                )
                self._abandon(fetches)
        return not fetches.waiting

    def _begin(self, request: Request, num_computed_tokens: int) -> _Fetches:
        """Start to fetch the features of images that the KV cache does not cover."""
        deadline = time.monotonic() + self._settings.encode_timeout_s
        fetches = _Fetches(ImageFeatureSource(**request.ec_transfer_params), deadline)
        if self._plane is not None:
            self._collect()  # frees the blocks of abandoned fetches
        for identifier, index, end, rows in _images(request):
            is_needed = end > num_computed_tokens
            if is_needed and self._open().fetch(fetches.source, index, rows):
                fetches.waiting[identifier] = fetches.source.transfer_of(index)
            else:
                fetches.unneeded.append(index)
        fetches.wanted = len(fetches.waiting)
        return fetches

    def _collect(self) -> None:
        """Take the features that have arrived, and the failures, of all requests."""
        by_transfer = {
            transfer_id: (request_id, fetches, identifier)
            for request_id, fetches in self._fetches.items()
            for identifier, transfer_id in fetches.waiting.items()
        }
        for each in self.plane.collect():
            if each.transfer_id not in by_transfer:
                if not each.reason:
                    self.plane.drop(each.transfer_id)  # given up meanwhile
                continue
            request_id, fetches, identifier = by_transfer[each.transfer_id]
            del fetches.waiting[identifier]
            if each.reason:
                logger.warning(
                    "the features of an image did not arrive: computed here: %s", each.reason
                )
                continue
            fetches.fetched += 1
            width = fetches.source.row_bytes // self._dtype.itemsize
            self._forget(identifier)  # another request's, of the same image
            self._arrived[identifier] = _Arrived(request_id, each.transfer_id, width)

    def _forget(self, identifier: str) -> None:
        if (arrived := self._arrived.pop(identifier, None)) is not None:
            self.plane.drop(arrived.transfer_id)

    def _abandon(self, fetches: _Fetches) -> None:
        for transfer_id in fetches.waiting.values():
            self.plane.cancel(transfer_id, "not needed any more")
        fetches.waiting.clear()

    def has_cache_item(self, identifier: str) -> bool:
        return identifier in self._arrived

    def update_state_after_alloc(self, request: Request, index: int) -> None:
        identifier = request.mm_features[index].identifier
        if (found := self._arrived.pop(identifier, None)) is not None:
            rows = torch.frombuffer(self.plane.take(found.transfer_id), dtype=self._dtype)
            self._loads[identifier] = rows.view(-1, found.width)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> EcStepMetadata:
        # Also requests that ended before they were scheduled, so that their features are refused.
        known = {x.req_id for x in scheduler_output.scheduled_new_reqs}
        known |= scheduler_output.finished_req_ids
        wanted = {x: self._wanted.pop(x) for x in known & self._wanted.keys()}
        metadata = EcStepMetadata(wanted, self._loads)
        self._loads = {}
        return metadata

    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        request_id = request.request_id
        self._known.discard(request_id)
        fetches = self._fetches.pop(request_id, None)
        if fetches is None:
            return False, None
        self._abandon(fetches)
        for index in fetches.unneeded:
            self._open().decline(fetches.source, index)
        for identifier in [x for x, each in self._arrived.items() if each.request_id == request_id]:
            self._forget(identifier)
        return False, {"wanted": fetches.wanted, "fetched": fetches.fetched}


def _images(request: Request) -> Iterator[tuple[str, int, int, int]]:
    """Yield the images of a request, each once: identifier, number in the prompt, end of the
    placeholder, number of tokens with features."""
    seen = set()
    for index, feature in enumerate(request.mm_features):
        place = feature.mm_position
        if feature.identifier not in seen:
            seen.add(feature.identifier)
            yield feature.identifier, index, place.offset + place.length, place.get_num_embeds()
