"""What the two halves of the connector tell each other. No torch, no vllm.

Scheduler → worker: `StepMetadata`, with every step. Worker → scheduler: `WorkerOutput`, when there
is something to say. At start: `PdHandshake`, to whoever registers the worker. metadata.py makes
them pass for vLLM's own.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from pdserve.types import HandoffStyle

if TYPE_CHECKING:
    from pdserve.types import ErrorInfo, TransferReport


@dataclass(frozen=True)
class PdHandshake:
    """Where this worker's KV is reached and with whom it can be exchanged."""

    address: str
    compatibility: str
    layout: dict[str, str]
    transports: tuple[str, ...]
    handoff: HandoffStyle = HandoffStyle.CONCURRENT


@dataclass(frozen=True, slots=True)
class SourceExpected:
    """The engine has taken in a request whose KV somebody will ask for."""

    transfer_id: str
    request_id: str


@dataclass(frozen=True, slots=True)
class SourceProgress:
    """When this step has run, the first `ready_tokens` tokens have their KV in `block_ids`."""

    transfer_id: str
    block_ids: list[int]
    ready_tokens: int


@dataclass(frozen=True, slots=True)
class SourceEnded:
    """A source request ended; `held` blocks wait to be released. Without `request_id` it is the one
    that was expected last under the transfer's id."""

    transfer_id: str
    token_ids: tuple[int, ...]
    held: bool
    request_id: str = ""


@dataclass(frozen=True, slots=True)
class TargetStart:
    """Blocks are reserved for tokens [first_block * block_size, num_tokens)."""

    transfer_id: str
    request_id: str
    producer_addresses: tuple[str, ...]  # by tensor-parallel rank
    producer_instance_id: str
    first_block: int
    num_tokens: int
    block_ids: list[int]


@dataclass(frozen=True, slots=True)
class Unneeded:
    """A target request wants nothing from its source after all."""

    transfer_id: str
    producer_addresses: tuple[str, ...]  # by tensor-parallel rank
    producer_instance_id: str


@dataclass
class StepMetadata:
    """All that the worker half must know for one step."""

    expected: list[SourceExpected] = field(default_factory=list)
    progress: list[SourceProgress] = field(default_factory=list)
    # Computed by earlier steps; the requests end with this one.
    computed: list[SourceProgress] = field(default_factory=list)
    ended: list[SourceEnded] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    starts: list[TargetStart] = field(default_factory=list)
    cancels: list[str] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    unneeded: list[Unneeded] = field(default_factory=list)
    # request id → why its load fails before it begins
    refused: dict[str, str] = field(default_factory=dict)
    # request id → output tokens that were generated elsewhere, in the step that first schedules it
    resumed: dict[str, list[int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request's KV is here, and these are the tokens that its source sampled."""

    request_id: str
    token_ids: tuple[int, ...]
    report: TransferReport

    def beside(self, other: Arrival) -> Arrival:
        """What came to two tensor-parallel ranks; both were told the same tokens."""
        return replace(self, report=self.report.beside(other.report))


@dataclass
class WorkerOutput:
    """What the worker half reports beside finished and failed request ids."""

    arrivals: dict[str, Arrival] = field(default_factory=dict)
    failures: dict[str, ErrorInfo] = field(default_factory=dict)

    def aggregate(self, other: WorkerOutput) -> WorkerOutput:
        """Joins the reports of tensor-parallel ranks on one step."""
        for request_id, arrival in other.arrivals.items():
            ours = self.arrivals.get(request_id)
            self.arrivals[request_id] = arrival if ours is None else ours.beside(arrival)
        self.failures = other.failures | self.failures
        return self
