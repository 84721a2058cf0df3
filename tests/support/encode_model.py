"""A model of a request with images, whose features an encode worker computes, for the explorer. The
connectors of encoder caches and their planes are real (PdEcConnector, ImageFeaturePlane), as are
Producer and Consumer; the links are those of the model of a hand-off.

The features of an image are one row. The world's `p` is the encode worker, and `d` the prefill
worker that fetches them; their blocks are the pools of the planes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from kv_transfer.image_features import _PLAN, ImageFeaturePlane
from kv_transfer.protocol.consumer import Consumer
from kv_transfer.protocol.producer import Producer, Release
from kv_transfer.vllm import ec_connector
from kv_transfer.vllm.ec_connector import PdEcConnector
from tests.support.handoff_model import (
    LEASE_S,
    RECEIVE_S,
    FrameQueue,
    HandoffWorld,
    ModelLink,
    ModelWorker,
    Wire,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.support.explorer import Action

FAULTS = (
    *("kill_p", "break_link", "lose", "double", "damage", "pause"),
    *("late", "abort", "abort_encode"),
)
POOL = "pool"  # the owner of a plane's blocks
ENCODE_S = 5.0
WIDTH = 2  # values of a row
DTYPE = torch.float32


def features(index: int) -> torch.Tensor:
    return torch.full((1, WIDTH), index + 1.0, dtype=DTYPE)


@dataclass(slots=True)
class Clock:
    now: float = 0.0

    def monotonic(self) -> float:
        return self.now


@dataclass(slots=True)
class ModelPool:
    """A plane's pool of `size` blocks."""

    worker: ModelWorker
    size: int

    def allocate(self, _size: int) -> list[int] | None:
        free = [n for n in range(self.size) if n not in self.worker.owner]
        self.worker.owner |= dict.fromkeys(free[:1], POOL)
        return free[:1] or None

    def free(self, block_ids: Sequence[int]) -> None:
        for block in block_ids:
            del self.worker.owner[block]

    def write(self, block_ids: Sequence[int], data: memoryview) -> None:
        self.worker.memory[block_ids[0]] = bytes(data)

    def read(self, block_ids: Sequence[int], _size: int) -> bytearray:
        return bytearray(self.worker.memory[block_ids[0]])


@dataclass(slots=True)
class ModelDriver:
    """Both machines of a plane. `actions`: what they decided in this step of the world."""

    clock: Clock
    producer: Producer[Wire]
    consumer: Consumer[Wire]
    actions: list[Any] = field(default_factory=list)
    released: list[str] = field(default_factory=list)

    def drive(self, decide: Callable[[float], Any]) -> None:
        self.actions += decide(self.clock.now)

    def take_results(self) -> tuple[list[str], list[Any]]:
        released, self.released = self.released, []
        return released, self.consumer.take_outcomes()


@dataclass(slots=True)
class ModelPeers:
    """The links of a plane. `is_gone`: no encode worker accepts them any more."""

    driver: ModelDriver
    links: dict[Wire, ModelLink]
    is_gone: bool = False

    def link_to(self, _address: str, _instance_id: str) -> Wire:
        usable = [wire for wire, link in self.links.items() if link.d_up]
        wire = usable[-1] if usable else [*Wire][len(self.links)]
        self.links.setdefault(wire, ModelLink(p_up=not self.is_gone))
        return wire


@dataclass(slots=True)
class ModelRequest:
    request_id: str
    ec_transfer_params: dict[str, Any]
    mm_features: list[Any]


def _request(name: str, images: int) -> ModelRequest:
    """Return a request with images, as vLLM's schedulers have it."""
    params = {"transfer_id": "t", "address": "e", "instance_id": "e", "row_bytes": WIDTH * 4}
    return ModelRequest(name, params, [ModelImage(n) for n in range(images)])


@dataclass(frozen=True, slots=True)
class ModelImage:
    """An image at its place in the prompt."""

    index: int

    @property
    def identifier(self) -> str:
        return f"image {self.index}"

    @property
    def mm_position(self) -> ModelImage:
        return self

    @property
    def offset(self) -> int:
        return self.index

    @property
    def length(self) -> int:
        return 1

    def get_num_embeds(self) -> int:
        return 1


def _plane(peers: ModelPeers, worker: ModelWorker, blocks: int) -> ImageFeaturePlane:
    plane: Any = ImageFeaturePlane.__new__(ImageFeaturePlane)
    plane._pool, plane._peers = ModelPool(worker, blocks), peers
    plane._offered, plane._fetching, plane._arrived = {}, {}, {}
    made: ImageFeaturePlane = plane
    return made


def _connector(plane: ImageFeaturePlane | None, *, is_producer: bool) -> PdEcConnector:
    made: Any = PdEcConnector.__new__(PdEcConnector)
    made._is_producer, made._plane, made._dtype = is_producer, plane, DTYPE
    made._settings = SimpleNamespace(encode_timeout_s=ENCODE_S)
    made._device, made._connector_metadata = "cpu", None
    made._wanted, made._known = {}, set()
    made._fetches, made._arrived, made._loads = {}, {}, {}
    connector: PdEcConnector = made
    return connector


class EncodeWorld(HandoffWorld):
    """The whole state. `encoded`: images that the encode worker has encoded, None after its
    request. `loaded`: images whose features the prefill worker has fetched, None before it
    schedules the request. `blocks`: of the encode worker's pool."""

    def __init__(
        self, faults: int, kinds: tuple[str, ...], *, images: int, blocks: int, is_pull: bool
    ) -> None:
        self.faults, self.kinds, self.is_pull, self.images = faults, kinds, is_pull, images
        self.clock, self.damages, self.ending = Clock(), 0, ""
        self.client, self.routers, self.links = [], [], {}
        self.workers = {"p": ModelWorker(), "d": ModelWorker()}
        offering, fetching = self.new_driver(), self.new_driver()
        self.drivers = {"p": offering, "d": fetching}
        self.producer, self.consumer = offering.producer, fetching.consumer
        self.peers = ModelPeers(fetching, self.links)
        offers = _plane(ModelPeers(offering, {}), self.workers["p"], blocks)
        fetches = _plane(self.peers, self.workers["d"], images)
        self.encoder = _connector(offers, is_producer=True)
        self.encode_scheduler = _connector(None, is_producer=True)
        self.prefill = _connector(fetches, is_producer=False)
        self.encode_request = _request("e", images)
        self.request = _request("r", images)
        self.encoded: int | None = 0
        self.loaded: list[int] | None = None

    def new_driver(self) -> ModelDriver:
        producer: Producer[Wire] = Producer(
            plan=_PLAN, chunk_blocks={0: 1}, hold_s=LEASE_S, heartbeat_s=5.0
        )
        return ModelDriver(self.clock, producer, Consumer[Wire](RECEIVE_S))

    @property
    def now(self) -> float:  # type: ignore[override]
        return self.clock.now

    # -- the encode worker

    def encode_step(self) -> None:
        """Run a step of the encode worker, which encodes an image."""
        assert self.encoded is not None
        is_new = self.encoded == 0
        if is_new:
            assert self.encode_scheduler.ensure_cache_available(self.encode_request, 0)
        self.send_metadata(is_new=is_new, is_ended=False)
        cache = {f"image {self.encoded}": features(self.encoded)}
        self.encoder.start_save_caches(encoder_cache={})
        self.encoder.save_caches(cache, f"image {self.encoded}")
        self.encoded += 1
        if self.encoded == self.images:
            self.end_encode()

    def end_encode(self) -> None:
        """End the encode worker's request, in its next step."""
        if not self.encoded:
            self.encode_scheduler.ensure_cache_available(self.encode_request, 0)
        self.encode_scheduler.request_finished(self.encode_request)
        self.send_metadata(is_new=False, is_ended=True)
        self.encoder.start_save_caches(encoder_cache={})
        self.encoder.get_finished({"e"})
        self.encoded = None

    def send_metadata(self, *, is_new: bool, is_ended: bool) -> None:
        output: Any = SimpleNamespace(
            scheduled_new_reqs=[SimpleNamespace(req_id="e")] * is_new,
            finished_req_ids={"e"} if is_ended else set(),
        )
        metadata = self.encode_scheduler.build_connector_meta(output)
        self.encoder._connector_metadata = metadata

    # -- the prefill worker

    def prefill_poll(self) -> None:
        """Schedule a step of the prefill worker. It computes the prompt when no fetch is waited
        for, and encodes the images whose features it lacks."""
        with mock.patch.object(ec_connector, "time", self.clock):
            if not self.prefill.ensure_cache_available(self.request, 0):  # type: ignore[arg-type]
                return
        for index, image in enumerate(self.request.mm_features):
            if self.prefill.has_cache_item(image.identifier):
                self.prefill.update_state_after_alloc(self.request, index)  # type: ignore[arg-type]
        output: Any = SimpleNamespace(scheduled_new_reqs=[], finished_req_ids=set())
        cache: dict[str, torch.Tensor] = {}
        self.prefill._connector_metadata = self.prefill.build_connector_meta(output)
        self.prefill.start_load_caches(cache)
        self.prefill._connector_metadata = None
        self.loaded = []
        for index in range(self.images):
            rows = cache.get(f"image {index}")
            if rows is not None:
                assert torch.equal(rows, features(index)), "features of another image"
                self.loaded.append(index)

    def wait(self) -> None:
        """Wait until the deadline of the features: nothing else happens any more."""
        self.pass_time(ENCODE_S)

    def end_request(self) -> None:
        _, reported = self.prefill.request_finished(self.request)  # type: ignore[arg-type]
        if self.loaded is not None:
            assert reported is not None
            assert reported["fetched"] == len(self.loaded), "counted what was not fetched"
            assert reported["wanted"] >= reported["fetched"]
        self.ending = "finished"

    # -- the links

    def owners_of(self, tid: str) -> set[str | None]:
        return {POOL}

    def do_producer(self, actions: Any) -> None:
        for action in actions:
            if isinstance(action, Release):
                copied = [x.copying for x in self.links.values() if x.copying and x.p_up]
                read = {block for chunk in copied for block in chunk.block_ids}
                blocks = self.encoder.plane._offered[action.request_id]
                assert not read & {*blocks}, "released under a copy"
                self.drivers["p"].released.append(action.request_id)
            else:
                super().do_producer([action])

    def pass_time(self, seconds: float) -> None:
        self.clock.now += seconds
        self.do_producer(self.producer.tick(self.now))
        self.do_consumer(self.consumer.tick(self.now))

    def do(self, action: Action) -> None:
        getattr(self, action[0])(*action[1:])
        self.flush()
        self.forget_texts()

    def flush(self) -> None:
        for name, perform in (("p", self.do_producer), ("d", self.do_consumer)):
            driver = self.drivers[name]
            actions, driver.actions = driver.actions, []
            perform(actions)

    # -- faults, and possible actions

    def fault(self, kind: str, *where: Any) -> None:
        self.faults -= 1
        match kind:
            case "kill_p":
                self.peers.is_gone, self.encoded = True, None
                for link in self.links.values():
                    link.p_up, link.to_p, link.queue, link.copying = False, [], [], None
            case "late":
                self.pass_time(ENCODE_S)
            case "abort":
                self.end_request()
            case "abort_encode":
                self.end_encode()
            case "break_link":
                self.producer_down(where[0])
            case "lose" | "double":
                messages = where[0](self)
                messages[:1] = [] if kind == "lose" else [messages[0], messages[0]]
            case "damage":
                self.damages = 1
            case "pause":
                self.pass_time(RECEIVE_S)

    def enabled(self) -> list[Action]:
        found = self.enabled_on_links()
        if self.encoded is not None:
            found.append(("encode_step",))
        fetches = self.prefill._fetches.get("r")
        if self.ending:
            return found
        if self.loaded is not None:
            return [*found, ("end_request",)]
        is_late = fetches is not None and self.now >= fetches.deadline
        if fetches is None or self.consumer.has_outcomes or is_late:
            found.append(("prefill_poll",))
        return found or [("wait",)]

    def possible_faults(self) -> list[Action]:
        if not self.faults:
            return []
        kinds = [] if self.peers.is_gone else ["kill_p"]
        kinds += [] if self.damages else ["damage"]
        kinds += ["late", "pause"] if not self.ending else []
        kinds += ["abort"] if not self.ending else []
        kinds += ["abort_encode"] if self.encoded is not None else []
        found: list[Action] = [("fault", kind) for kind in kinds if kind in self.kinds]
        for wire, link in self.links.items():
            if link.p_up and link.d_up and "break_link" in self.kinds:
                found.append(("fault", "break_link", wire))
            for end, messages in (("to_p", link.to_p), ("to_d", link.to_d)):
                on_link = [x for x in ("lose", "double") if messages and x in self.kinds]
                found += [("fault", x, FrameQueue(wire, end)) for x in on_link]
        return found

    def without_effect(self) -> Action | None:
        return None

    def settle(self) -> None:
        """Run until everything has ended, including timeouts and holds. Assert that nothing is
        left."""
        for _ in range(4):
            while actions := self.enabled():
                self.do(actions[0])
            self.pass_time(RECEIVE_S)
            self.prefill._collect()
            if not self.peers.is_gone:
                self.encoder.plane.collect()
            self.flush()
        assert self.ending == "finished", "the request has not ended"
        assert not self.workers["d"].owner, "the prefill worker keeps blocks"
        assert len(self.consumer) == 0, "the prefill worker keeps transfers"
        prefill = self.prefill
        assert not any((prefill._fetches, prefill._arrived, prefill._loads)), "features are left"
        if not self.peers.is_gone:
            assert not self.workers["p"].owner, "the encode worker keeps blocks"
            assert len(self.producer) == 0, "the encode worker keeps transfers"
            assert not any((self.encoder._wanted, self.encode_scheduler._known))
