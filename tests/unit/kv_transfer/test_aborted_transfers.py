"""Requests that end while they receive KV, send it, or both, in vLLM's own scheduler.

vLLM frees a request's blocks when a connector reports that its receive or its send has ended. A
second report ends the engine (vllm#46240), so a request must never get both."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from vllm.config import KVTransferConfig
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from kv_transfer.vllm.connector import first_of, start_arrived
from kv_transfer.vllm.params import ConsumerParams, ProducerParams, TransferParams
from kv_transfer.vllm.step import Arrival, WorkerOutput
from pdserve.types import TransferReport
from tests.support.scheduled import ScheduledEngine, scheduler_config

if TYPE_CHECKING:
    from vllm.config import VllmConfig

ARRIVAL = Arrival("r", (7,), TransferReport(0.1, 0.0, 64, 2, "shm"))
PRODUCER = TransferParams(ProducerParams("t"))
CONSUMER = TransferParams(ConsumerParams("t", ("127.0.0.1:1",), "p"))
ABORTED, WAITING = RequestStatus.FINISHED_ABORTED, RequestStatus.WAITING_FOR_REMOTE_KVS


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> VllmConfig:
    return scheduler_config(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def engine(config: VllmConfig) -> ScheduledEngine:
    return ScheduledEngine(config)


@pytest.fixture
def tiered(config: VllmConfig) -> ScheduledEngine:
    """An engine with a tier behind our connector, as with worker.kv.tiers."""
    alone: Any = config.kv_transfer_config
    common = {"kv_role": "kv_both", "kv_load_failure_policy": "fail"}
    parts = [
        {
            **common,
            "kv_connector": name,
            "kv_connector_module_path": module,
            "kv_connector_extra_config": dict(extra),
        }
        for name, module, extra in (
            ("PdConnector", "kv_transfer.vllm.connector", alone.kv_connector_extra_config),
            ("SlowTier", "tests.support.scheduled", {}),
        )
    ]
    both = KVTransferConfig(
        **common,
        kv_connector="TieredConnector",
        kv_connector_module_path="kv_transfer.vllm.tiers",
        kv_connector_extra_config={"connectors": parts},
        engine_id="d",
    )
    return ScheduledEngine(replace(config, kv_transfer_config=both))


def half_of(engine: ScheduledEngine) -> Any:
    return first_of(engine.scheduler.get_kv_connector())


def step(engine: ScheduledEngine, **reports: Any) -> None:
    """Run one step. `sent` and `received`: requests that the worker half reports with it."""
    engine.launch()
    engine.end_step(KVConnectorOutput(**reports) if reports else None)


def assert_nothing_left(engine: ScheduledEngine, free: int) -> None:
    step(engine)
    assert not engine.scheduler.requests
    assert engine.free_blocks == free
    assert half_of(engine).ledger().transfers == 0


@pytest.mark.parametrize(
    "reports",
    [
        [{"finished_recving", "finished_sending"}],
        [{"finished_recving"}, {"finished_sending"}],
        [{"finished_sending"}, {"finished_recving"}],
    ],
)
def test_an_answer_that_moves_on_before_its_load_is_reported_ends_once(
    engine: ScheduledEngine, reports: list[set[str]]
) -> None:
    """The only request with a receive and a send pending: its KV has arrived and it decodes, vLLM's
    report of the load is still to come, and it is aborted with its blocks held for the next
    worker."""
    free = engine.free_blocks
    engine.add("r", CONSUMER)
    step(engine)
    start_arrived(engine.scheduler, [ARRIVAL], 1)
    half_of(engine).take_arrivals()
    step(engine)
    request = engine.scheduler.requests["r"]
    assert half_of(engine).export(request, "moved")
    engine.scheduler.finish_requests(["r"], ABORTED)
    assert half_of(engine).holds("r")
    for names in reports:
        output: Any = {name: {"r"} for name in names}
        if "finished_recving" in names:
            output["kv_connector_worker_meta"] = WorkerOutput(arrivals={"r": ARRIVAL})
        step(engine, **output)
    assert_nothing_left(engine, free)


def test_a_prompt_that_loads_from_a_tier_is_not_held_for_its_consumer(
    tiered: ScheduledEngine,
) -> None:
    free = tiered.free_blocks
    tiered.add("r", PRODUCER)
    step(tiered)
    assert tiered.scheduler.requests["r"].status is WAITING
    tiered.scheduler.finish_requests(["r"], ABORTED)
    assert "r" in tiered.scheduler.requests  # its blocks are kept for the receive,
    assert not half_of(tiered).holds("r")  # and for nothing else
    tiered.launch()
    (ended,) = tiered.metadata.metadata[0].ended
    assert not ended.held  # so the worker half never reports that it was sent
    tiered.end_step(KVConnectorOutput(finished_recving={"r"}))
    assert_nothing_left(tiered, free)


def test_a_prompt_is_held_once_its_load_from_a_tier_has_ended(tiered: ScheduledEngine) -> None:
    free = tiered.free_blocks
    tiered.add("r", PRODUCER, max_tokens=1)
    step(tiered)
    step(tiered, finished_recving={"r"})
    step(tiered)
    assert half_of(tiered).holds("r")
    assert tiered.scheduler.finish_requests(["r"], ABORTED) == []  # it has ended already
    step(tiered, finished_sending={"r"})
    assert_nothing_left(tiered, free)


def test_an_answer_that_waits_for_kv_does_not_move(
    engine: ScheduledEngine, tiered: ScheduledEngine
) -> None:
    """Also after a preemption, when a tier loads the KV of tokens that are known to the client."""
    engine.add("r", CONSUMER)
    tiered.add("r")
    for each in (engine, tiered):
        step(each)
        request = each.scheduler.requests["r"]
        assert request.status is WAITING
        request.append_output_token_ids(5)
        assert not half_of(each).export(request, "moved")
        assert not half_of(each).holds("r")
