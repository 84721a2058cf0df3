"""What a producer does while the GPU still runs the engine's steps. With asynchronous scheduling
one runs and another is enqueued. Here events stand for the ends of steps, and the cache is in host
memory."""

from __future__ import annotations

import select
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from kv_transfer.cache.host_memory import KvRegion
from kv_transfer.errors import KvTransferError
from kv_transfer.vllm.step import ProducerEnded, ProducerProgress
from tests.support.kv_pair import (
    FROM,
    TO,
    TOKENS,
    KvWorker,
    KvWorkers,
    N,
    check_exact,
    settle,
    transfer,
    until,
)
from tests.support.timeouts import WAIT_S


class Gpu:
    """Runs the steps of a worker, when told to."""

    def __init__(self, worker: KvWorker) -> None:
        self._worker = worker
        self._ends: list[threading.Event] = []
        region: Any = worker.driver.local.memory
        region.step_end = self._enqueue

    def _enqueue(self) -> Any:
        end = threading.Event()
        self._ends.append(end)
        return SimpleNamespace(synchronize=lambda: end.wait(WAIT_S))

    def run(self, *blocks: int) -> None:
        """Run the oldest enqueued step, which fills these blocks."""
        for block in blocks:
            self._worker.cache.write(block, seed=block)
        self._ends.pop(0).set()


@pytest.fixture
def gpu(kv_workers: KvWorkers) -> Gpu:
    return Gpu(kv_workers.worker())


def test_each_block_goes_when_its_own_step_has_ended_and_the_next_one_runs(
    kv_workers: KvWorkers, gpu: Gpu
) -> None:
    """A busy producer keeps up, one step behind."""
    source, target = gpu._worker, kv_workers.worker()
    before = target.cache.blocks()
    target.start(source, "t", TO, N)
    source.expect("t")
    until(lambda: source.look().transfers[0].transport, source)  # the subscription is here
    source.compute("t", FROM[:1], 4)
    for count in (2, 3, 4):
        source.compute("t", FROM[:count], min(N, 4 * count))
        assert source.driver.counters.pushed_blocks == count - 2
        gpu.run(FROM[count - 2])
        until(lambda n=count - 1: source.driver.counters.pushed_blocks == n, source, target)  # type: ignore[misc]
    gpu.run(FROM[3])
    source.finish("t")
    settle(source, target)
    check_exact(source, target, before)
    assert target.look().totals["digest_mismatches"] == 0


def test_an_end_waits_for_its_own_blocks_and_for_no_other_step(
    kv_workers: KvWorkers, gpu: Gpu
) -> None:
    """The ranks of a tensor-parallel worker end a step at different times."""
    source, target = gpu._worker, kv_workers.worker()
    for name, to in (("t", TO), ("u", [0, 2, 4, 6])):
        target.start(source, name, to, N)
        source.expect(name)
    source.compute("t", FROM, N)
    source.compute("u", [8, 9, 10, 11], N)
    source.step(ended=[ProducerEnded("t", TOKENS, held=True)])
    assert target.ended == []
    gpu.run(*FROM)
    until(lambda: target.arrivals, source, target)
    assert target.arrivals.keys() == {"d-t"}
    source.step(ended=[ProducerEnded("u", TOKENS, held=True)], released=["u"])
    gpu.run()
    settle(source, target)
    assert target.failures == {"d-u": "the request was cancelled"}
    assert source.sent == ["p-t", "p-u"]


def test_a_step_that_ends_after_a_preemption_announces_nothing_of_it(
    kv_workers: KvWorkers, gpu: Gpu
) -> None:
    source, target = gpu._worker, kv_workers.worker()
    target.start(source, "t", TO, N)
    source.expect("t")
    source.compute("t", FROM[:2], 8)
    source.step(preempted=["t"])
    gpu.run()
    source.step(progress=[ProducerProgress("t", [[20]], 4)])
    gpu.run()
    until(lambda: source.driver.counters.pushed_blocks == 1, source, target)
    assert source.look().transfers[0].blocks == 1


def test_each_thread_takes_the_gpu_of_the_cache_before_it_uses_it(
    kv_workers: KvWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise CUDA opens a context on GPU 0 in the process of every other rank."""
    entered, used = set[int](), set[int]()
    monkeypatch.setattr(KvRegion, "enter_thread", lambda _: entered.add(threading.get_ident()))

    def noted(act: Any) -> Any:
        def act_and_note(*args: Any) -> Any:
            used.add(threading.get_ident())
            return act(*args)

        return act_and_note

    for name in ("pages", "copy_from", "digests"):
        monkeypatch.setattr(KvRegion, name, noted(getattr(KvRegion, name)))
    end = SimpleNamespace(synchronize=lambda: used.add(threading.get_ident()))
    monkeypatch.setattr(KvRegion, "step_end", lambda _: end)
    source, target = kv_workers.pair()
    transfer(source, target)
    used.discard(threading.get_ident())  # the engine's own
    assert len(used) > 2
    assert used <= entered


def test_nothing_is_copied_before_the_gpu_has_filled_the_cache_with_zeros(
    tcp_workers: KvWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    did: list[str] = []
    monkeypatch.setattr(KvRegion, "is_host", False)
    monkeypatch.setattr(KvRegion, "copy_from", lambda *_: did.append("copied"))
    end = SimpleNamespace(synchronize=lambda: did.append("zeroed"))
    monkeypatch.setattr(KvRegion, "step_end", lambda _: end)
    tcp_workers.worker()
    assert did == ["zeroed", "copied", "copied"]


def test_a_thread_that_fails_ends_the_engine_when_it_takes_results(
    kv_workers: KvWorkers, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each hand-over would time out, and its blocks stay taken, while steps go on. The thread
    wakes an engine that is idle."""
    source, target = gpu._worker, kv_workers.worker()
    target.start(source, "t", TO, N)
    source.expect("t")
    source.step(progress=[ProducerProgress("t", [FROM[:1]], 4)])

    def fail(*_: Any) -> Any:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(source.driver.producer, "progress", fail)
    source.driver.wakeup.clear()
    gpu.run()
    assert select.select([source.driver.wakeup], [], [], WAIT_S)[0]
    with pytest.raises(KvTransferError, match="can't start new thread"):
        source.half.take_results()


@pytest.mark.parametrize("has_draft_kv", [True, False])
def test_blocks_are_filled_when_the_draft_of_a_past_step_has_written_to_them(
    tcp_workers: KvWorkers, has_draft_kv: bool
) -> None:
    """Only the thread that watches steps waits: the engine starts its next step at once."""
    source, target = tcp_workers.worker(), tcp_workers.worker(has_draft_kv=has_draft_kv)
    gpu = Gpu(target)
    target.start(source, "t", TO, N)  # returns while the draft still runs
    assert len(target.links) == (not has_draft_kv)
    source.prefill("t", FROM, N)
    if has_draft_kv:
        gpu.run()
    settle(source, target)
    assert target.arrivals.keys() == {"d-t"}


def test_a_load_that_waits_for_a_draft_can_be_cancelled(tcp_workers: KvWorkers) -> None:
    source, target = tcp_workers.worker(), tcp_workers.worker(has_draft_kv=True)
    gpu, before = Gpu(target), target.cache.blocks()
    source.prefill("t", FROM, N)
    target.start(source, "t", TO, N)
    target.cancel("t")
    assert target.failures == {"d-t": "cancelled"}
    gpu.run()
    settle(source, target)
    assert source.sent == ["p-t"]
    assert target.cache.blocks() == before
