"""How many steps of vLLM's own scheduler lie between the arrival of KV and the step that uses it,
with two steps in flight as on a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from kv_transfer.vllm.connector import first_of, start_arrived
from kv_transfer.vllm.params import ConsumerParams, TransferParams
from kv_transfer.vllm.step import Arrival, WorkerOutput
from pdserve.types import TransferReport
from tests.support.scheduled import ScheduledEngine, scheduler_config

if TYPE_CHECKING:
    from vllm.config import VllmConfig

RANKS = 2
ARRIVAL = Arrival("c", (7,), TransferReport(0.1, 0.0, 64, 2, "shm"))


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> VllmConfig:
    return scheduler_config(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def engine(config: VllmConfig) -> ScheduledEngine:
    """One request decodes, another waits for KV, and two steps are in flight."""
    made = ScheduledEngine(config)
    made.add("busy")
    assert made.launch() == {"busy"}
    consumer = ConsumerParams("t", ("127.0.0.1:1", "127.0.0.1:2"), "p")
    made.add("c", TransferParams(consumer))
    assert made.launch() == {"busy"}
    return made


def reported() -> KVConnectorOutput:
    """Return vLLM's report that the load has ended on all ranks."""
    meta: Any = WorkerOutput(arrivals={"c": ARRIVAL.merged_with(ARRIVAL)})
    return KVConnectorOutput(finished_recving={"c"}, kv_connector_worker_meta=meta)


def test_the_next_step_computes_the_token_after_an_arrival_on_all_ranks(
    engine: ScheduledEngine,
) -> None:
    """vLLM's own report of the load comes steps later, and changes nothing."""
    start_arrived(engine.scheduler, [ARRIVAL] * RANKS, RANKS)
    half = first_of(engine.scheduler.get_kv_connector())
    assert [x.report.bytes for x in half.take_arrivals()] == [128]
    engine.end_step()
    assert engine.launch() == {"busy", "c"}
    engine.end_step(reported())
    assert engine.launch() == {"busy", "c"}
    assert half.take_arrivals() == []
    assert list(engine.scheduler.requests["c"].output_token_ids) == [7]
    engine.end_step()
    assert list(engine.scheduler.requests["c"].output_token_ids) == [7, 5]


def test_an_arrival_that_vllm_reports_alone_waits_for_the_steps_in_flight(
    engine: ScheduledEngine,
) -> None:
    """As under `vllm serve`, or where a rank's arrival is late or lost."""
    start_arrived(engine.scheduler, [ARRIVAL] * (RANKS - 1), RANKS)
    engine.end_step()
    assert engine.launch() == {"busy"}
    engine.end_step(reported())
    assert engine.launch() == {"busy", "c"}
    half = first_of(engine.scheduler.get_kv_connector())
    assert [x.report.bytes for x in half.take_arrivals()] == [128]
    start_arrived(engine.scheduler, [ARRIVAL], RANKS)  # late
    assert half.take_arrivals() == []


def test_a_started_request_may_end_before_vllm_reports_its_load(engine: ScheduledEngine) -> None:
    start_arrived(engine.scheduler, [ARRIVAL] * RANKS, RANKS)
    engine.scheduler.finish_requests(["c"], RequestStatus.FINISHED_ABORTED)
    engine.end_step()
    engine.end_step(reported())
    assert engine.launch() == {"busy"}
    assert first_of(engine.scheduler.get_kv_connector()).ledger().transfers == 0
