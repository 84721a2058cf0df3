"""What the two halves of the connector tell each other. No torch, no vllm.

Scheduler half to worker half: `StepMetadata`, with every step. Worker half to scheduler half:
`WorkerOutput`, when there is something to say. At start: `PdHandshake`, to the worker process.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from pdserve.types import HandoffStyle

if TYPE_CHECKING:
    from pdserve.types import ErrorInfo, TransferReport


@dataclass(frozen=True)
class PdHandshake:
    """Where this worker's KV is reached, and with which workers it can be exchanged."""

    address: str
    compatibility: str
    layout: dict[str, str]
    transports: tuple[str, ...]
    handoff: HandoffStyle = HandoffStyle.CONCURRENT


@dataclass(frozen=True, slots=True)
class ProducerExpected:
    """A request entered the engine whose KV a consumer will subscribe to."""

    transfer_id: str
    request_id: str


@dataclass(frozen=True, slots=True)
class ProducerProgress:
    """After this step, the first `ready_tokens` tokens have their KV where the engine's block
    `tables` say."""

    transfer_id: str
    tables: list[list[int]]
    ready_tokens: int


@dataclass(frozen=True, slots=True)
class ProducerEnded:
    """A producer request ended. If `held`, its blocks wait to be released.

    Without `request_id` it is the request that was last expected under the transfer's id.
    """

    transfer_id: str
    token_ids: tuple[int, ...]
    held: bool
    request_id: str = ""


@dataclass(frozen=True, slots=True)
class ConsumerStart:
    """Blocks are reserved for what the token after the first `num_tokens` needs: for each KV-cache
    group its first block, counted in the sequence, and the block ids from there on.

    `producer_addresses` are in the order of tensor-parallel ranks.
    """

    transfer_id: str
    request_id: str
    producer_addresses: tuple[str, ...]
    producer_instance_id: str
    num_tokens: int
    blocks: list[tuple[int, list[int]]]


@dataclass(frozen=True, slots=True)
class ConsumerDeclined:
    """A consumer request needs nothing from its producer."""

    transfer_id: str
    producer_addresses: tuple[str, ...]
    producer_instance_id: str


@dataclass
class StepMetadata:
    """What the worker half needs for one step."""

    expected: list[ProducerExpected] = field(default_factory=list)
    progress: list[ProducerProgress] = field(default_factory=list)
    # Computed by earlier steps, of requests that end with this one.
    computed: list[ProducerProgress] = field(default_factory=list)
    ended: list[ProducerEnded] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    starts: list[ConsumerStart] = field(default_factory=list)
    cancels: list[str] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    declined: list[ConsumerDeclined] = field(default_factory=list)
    # By request id, the reason why its load fails before it begins.
    refused: dict[str, str] = field(default_factory=dict)
    # By request id, output tokens generated elsewhere, in the step that first schedules it.
    resumed: dict[str, list[int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request's KV has arrived, with the tokens that its producer sampled."""

    request_id: str
    token_ids: tuple[int, ...]
    report: TransferReport

    def beside(self, other: Arrival) -> Arrival:
        """Combine the arrivals at two tensor-parallel ranks; both have the same tokens."""
        return replace(self, report=self.report.beside(other.report))


@dataclass
class WorkerOutput:
    """What the worker half reports beside finished and failed request ids."""

    arrivals: dict[str, Arrival] = field(default_factory=dict)
    failures: dict[str, ErrorInfo] = field(default_factory=dict)

    def aggregate(self, other: WorkerOutput) -> WorkerOutput:
        """Combine the reports of tensor-parallel ranks on one step."""
        for request_id, arrival in other.arrivals.items():
            ours = self.arrivals.get(request_id)
            self.arrivals[request_id] = arrival if ours is None else ours.beside(arrival)
        self.failures = other.failures | self.failures
        return self
