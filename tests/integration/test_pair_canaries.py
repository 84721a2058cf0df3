"""The router's own requests over pairs of workers: no client's request finds out what fails."""

from __future__ import annotations

from typing import TYPE_CHECKING

from router.pair_canaries import PairCanaries
from tests.cluster import Cluster
from tests.integration.test_fake_cluster import PLAIN, PROMPT, assert_same
from workers.fake_settings import FakeFaults

if TYPE_CHECKING:
    from tests.cluster import Answer

PAIR = ("prefill-0", "decode-0")


async def ask(cluster: Cluster) -> Answer:
    answer = await cluster.ask(PROMPT, PLAIN)
    assert_same(answer, cluster.expected(PROMPT, PLAIN))
    assert not answer.fallbacks
    return answer


async def test_canaries_keep_a_pair_apart_and_bring_it_back() -> None:
    async with Cluster(prefill=1, decode=1, router={"quarantine_s": 0.05}) as cluster:
        coordinator = cluster.router.coordinator
        fleet = coordinator._fleet
        cluster.faults("prefill-0", FakeFaults(drop_transfer="*"))
        async with PairCanaries(fleet, coordinator.metrics, idle_s=0.0, period_s=0.001):
            await cluster.until(lambda: fleet.quarantine.barred(fleet.now()) == {PAIR})
            # However often it is half open meanwhile, no client's request goes there.
            for _ in range(20):
                answer = await ask(cluster)
                assert answer.receipt is not None
                assert answer.receipt.prefill_worker == "decode-0"
            _, failed = await cluster.canaries()
            assert failed >= 3
            cluster.faults("prefill-0", FakeFaults())
            await cluster.until(lambda: not fleet.quarantine.barred(fleet.now()))
            answer = await ask(cluster)
            assert answer.receipt is not None
            assert answer.receipt.prefill_worker == "prefill-0"
        whole, _ = await cluster.canaries()
        assert whole >= 1
        lines = coordinator.metrics.render().decode().splitlines()
        counted = [x for x in lines if x.startswith("pdserve_pair_canaries_total{")]
        assert [float(x.split()[-1]) for x in counted if 'outcome="whole"' in x] == [whole]
