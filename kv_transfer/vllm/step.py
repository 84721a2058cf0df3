"""The messages between the two halves of the connector. No torch, no vllm.

Scheduler half to worker half: `StepMetadata`, with every step. Worker half to scheduler half:
`WorkerOutput`, if there is something to report. To the worker process at start: `PdHandshake`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from pdserve.types import ErrorInfo, TransferReport  # noqa: TC001 - msgspec reads Arrival's hints

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class PdHandshake:
    """This rank's KV address, and the key of the workers that can exchange KV with it.
    `stage_layers`: how many layers of each group each pipeline stage holds; empty if there is one
    stage."""

    address: str
    compatibility: str
    layout: dict[str, str]
    transports: tuple[str, ...]
    stage_layers: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class ProducerExpected:
    """A producer request entered the engine: a consumer will subscribe to its KV."""

    transfer_id: str
    request_id: str


@dataclass(frozen=True, slots=True)
class ProducerProgress:
    """After this step, the KV of the first `ready_tokens` tokens is in the blocks of the engine's
    block `tables`."""

    transfer_id: str
    tables: list[list[int]]
    ready_tokens: int


@dataclass(frozen=True, slots=True)
class ProducerEnded:
    """A producer request ended. If `held`, the engine keeps its blocks until they are released.

    Without `request_id`, the latest request expected under this transfer id is meant.
    """

    transfer_id: str
    token_ids: tuple[int, ...]
    held: bool
    request_id: str = ""


@dataclass(frozen=True, slots=True)
class ConsumerStart:
    """Blocks are reserved for the KV that the token after the first `num_tokens` needs. `blocks`
    has by number of the engine's block table the index of the first block in the sequence, and the
    block ids from there on.

    `producer_addresses` are in the order of ranks (protocol/plan.py). `producer_stage_layers`: how
    many layers of each group each pipeline stage of the producer holds; empty if it has one stage.
    """

    transfer_id: str
    request_id: str
    producer_addresses: tuple[str, ...]
    producer_instance_id: str
    num_tokens: int
    blocks: Mapping[int, tuple[int, list[int]]]
    producer_stage_layers: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class ConsumerDeclined:
    """A consumer request needs no KV from its producer."""

    transfer_id: str
    producer_addresses: tuple[str, ...]
    producer_instance_id: str


@dataclass
class StepMetadata:
    """The scheduler half's data for one step of the worker half."""

    expected: list[ProducerExpected] = field(default_factory=list)
    progress: list[ProducerProgress] = field(default_factory=list)
    # KV computed by earlier steps, of requests that end with this step.
    computed: list[ProducerProgress] = field(default_factory=list)
    ended: list[ProducerEnded] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    starts: list[ConsumerStart] = field(default_factory=list)
    cancels: list[str] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    declined: list[ConsumerDeclined] = field(default_factory=list)
    # Request id -> error, for loads that fail before they start.
    refused: dict[str, ErrorInfo] = field(default_factory=dict)
    # Request id -> output tokens generated elsewhere, in the step that first schedules the request.
    resumed: dict[str, list[int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request's KV has arrived, with the tokens that its producer sampled."""

    request_id: str
    token_ids: tuple[int, ...]
    report: TransferReport

    def merged_with(self, other: Arrival) -> Arrival:
        """Merge with the arrival at another rank, which has the same tokens."""
        return replace(self, report=self.report.merged_with(other.report))


@dataclass
class WorkerOutput:
    """The worker half's report, in addition to the ids of finished and failed requests."""

    arrivals: dict[str, Arrival] = field(default_factory=dict)
    failures: dict[str, ErrorInfo] = field(default_factory=dict)

    def aggregate(self, other: WorkerOutput) -> WorkerOutput:
        """Merge the reports of two ranks on one step."""
        for request_id, arrival in other.arrivals.items():
            ours = self.arrivals.get(request_id)
            self.arrivals[request_id] = arrival if ours is None else ours.merged_with(arrival)
        self.failures = other.failures | self.failures
        return self
