"""How many steps of vLLM's own scheduler lie between the arrival of KV and the step that uses it,
with two steps in flight as on a GPU."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import pytest
import torch
from vllm import SamplingParams
from vllm.usage.usage_lib import UsageContext
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kv_transfer.settings import ConnectorConfig
from kv_transfer.vllm.connector import first_of, start_arrived
from kv_transfer.vllm.params import ConsumerParams, TransferParams
from kv_transfer.vllm.step import Arrival, WorkerOutput
from pdserve.types import TransferReport
from tests.support.engines import settings
from tests.support.tiny_models import ModelSpec, make_model
from workers.vllm.start.args import make_config

if TYPE_CHECKING:
    from vllm.config import VllmConfig

RANKS = 2
ARRIVAL = Arrival("c", (7,), TransferReport(0.1, 0.0, 64, 2, "shm"))


class Engine:
    """vLLM's scheduler, and the steps in flight. The model samples token 5."""

    def __init__(self, config: VllmConfig) -> None:
        spec: Any = FullAttentionSpec(32, num_kv_heads=2, head_size=64, dtype=torch.float32)
        caches = KVCacheConfig(64, [], [KVCacheGroupSpec(["layer"], spec)])
        self.scheduler = AsyncScheduler(config, caches, StructuredOutputManager(config), 32)
        self._flying: deque[Any] = deque()

    def add(self, request_id: str, kv: TransferParams | None = None) -> None:
        params = SamplingParams(max_tokens=20)
        params.extra_args = {"kv_transfer_params": kv.to_dict()} if kv else None
        self.scheduler.add_request(Request(request_id, list(range(40)), params, None))

    def launch(self) -> set[str]:
        """Schedule a step. Return the requests in it."""
        output = self.scheduler.schedule()
        self._flying.append(output)
        return set(output.num_scheduled_tokens)

    def end_step(self, kv: KVConnectorOutput | None = None) -> None:
        """End the oldest step, which reports `kv`."""
        output = self._flying.popleft()
        names = list(output.num_scheduled_tokens)
        made = ModelRunnerOutput(names, {x: n for n, x in enumerate(names)}, [[5] for _ in names])
        made.kv_connector_output = kv
        self.scheduler.update_from_output(output, made)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> VllmConfig:
    model = make_model(tmp_path_factory.mktemp("models") / "tiny", ModelSpec())
    args = settings(model, kv=ConnectorConfig(), instance_id="d", enable_prefix_caching=False)
    made, _ = make_config(args, UsageContext.LLM_CLASS)
    made.scheduler_config.async_scheduling = True
    made.cache_config.num_gpu_blocks = 64
    return made


@pytest.fixture
def engine(config: VllmConfig) -> Engine:
    """One request decodes, another waits for KV, and two steps are in flight."""
    made = Engine(config)
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


def test_the_next_step_computes_the_token_after_an_arrival_on_all_ranks(engine: Engine) -> None:
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


def test_an_arrival_that_vllm_reports_alone_waits_for_the_steps_in_flight(engine: Engine) -> None:
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


def test_a_started_request_may_end_before_vllm_reports_its_load(engine: Engine) -> None:
    start_arrived(engine.scheduler, [ARRIVAL] * RANKS, RANKS)
    engine.scheduler.finish_requests(["c"], RequestStatus.FINISHED_ABORTED)
    engine.end_step()
    engine.end_step(reported())
    assert engine.launch() == {"busy"}
    assert first_of(engine.scheduler.get_kv_connector()).ledger().transfers == 0
