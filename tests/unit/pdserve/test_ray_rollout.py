"""What the controller on Ray starts and stops, and where."""

from __future__ import annotations

import msgspec
import pytest
from msgspec import structs

from pdserve.config import load_config
from pdserve.deploy.ray.rollout import Placed, choose_node, next_steps
from pdserve.deploy.ray.spec import ServiceSpec, place_of, service_spec
from pdserve.errors import ConfigError
from pdserve.types import Role


def spec_of(**changes: object) -> ServiceSpec:
    """A service with the keys `changes`, which have `__` for a dot."""
    keys = {key.replace("__", "."): value for key, value in changes.items()}
    config = load_config(None, {"worker.engine": "fake", **keys})
    return service_spec(config, cpus=1.0, gpus=0, strategy="spread")


def test_names_are_the_same_when_the_spec_was_stored() -> None:
    spec = spec_of(up__routers=2)
    stored = msgspec.json.decode(msgspec.json.encode(spec), type=ServiceSpec)
    assert stored.processes().keys() == spec.processes().keys()


def test_changed_workers_are_replaced_one_at_a_time_while_others_serve() -> None:
    before = spec_of(up__routers=2, up__decode__workers=3)
    after = before.upgraded(spec_of(up__routers=2, worker__log_level="debug", router__lease_s=4.0))
    assert after.counts == before.counts
    wanted, present = after.processes().keys(), set(before.processes())
    places, most = {*map(place_of, present)}, len(present)
    for _ in range(40):
        steps = next_steps(wanted, present, present, settled=True)
        assert {*map(place_of, present - steps.stop)} >= {x for x in places if "router" not in x}
        assert len([x for x in present - steps.stop if x.startswith("router")]) >= 1
        present = (present | steps.start) - steps.stop
        # One more of each role of workers at most.
        assert len(present) <= most + 2
    assert present == wanted


def test_an_old_worker_stays_while_the_new_one_does_not_serve() -> None:
    before = spec_of(up__decode__workers=2)
    after = before.upgraded(spec_of(worker__log_level="debug"))
    wanted, present = after.processes().keys(), set(before.processes())
    steps = next_steps(wanted, present, present, settled=True)
    assert {*map(place_of, steps.start)} == {"prefill-0", "decode-0"}
    again = next_steps(wanted, present | steps.start, present, settled=True)
    assert not again.start | again.stop


@pytest.mark.parametrize(("away", "settled"), [("", False), ("router-1", True)])
def test_a_router_stays_while_another_is_away_or_does_not_know_all(
    away: str, settled: bool
) -> None:
    before = spec_of(up__routers=2)
    wanted = before.upgraded(spec_of(up__routers=2, router__lease_s=4.0)).processes().keys()
    present = set(before.processes())
    serving = {name for name in present if place_of(name) != away}
    steps = next_steps(wanted, present, serving, settled=settled)
    assert "router-0" not in {*map(place_of, steps.stop)}


def test_a_single_router_is_not_replaced() -> None:
    with pytest.raises(ConfigError, match=r"up\.routers: 2"):
        spec_of().upgraded(spec_of(router__lease_s=4.0))
    two = spec_of().upgraded(spec_of(up__routers=2))
    assert spec_of().processes().items() <= two.processes().items()


def test_an_upgrade_keeps_counts_within_new_bounds() -> None:
    bounded = spec_of(up__decode__workers=2, up__decode__max_workers=3)
    counts = {"decode": 5, "prefill": 1, "aggregated": 0, "pooling": 0, "encode": 0}
    assert spec_of(up__decode__workers=5).upgraded(bounded).counts == counts | {"decode": 3}
    assert spec_of(up__decode__workers=5).upgraded(spec_of()).counts == counts
    with pytest.raises(ConfigError, match="decode follows the load"):
        bounded.scaled({"decode": 2})


def test_each_model_has_its_own_workers() -> None:
    models = [{"model_names": [name]} for name in ("org/a-b", "c")]
    models[1]["decode"] = {"workers": 1, "max_workers": 4, "warm_workers": 2}
    spec = spec_of(up__models=models)
    assert {x: spec.models[x] for x in spec.counts if spec.counts[x]} == {
        "prefill-org_a-b": "org/a-b",
        "decode-org_a-b": "org/a-b",
        "prefill-c": "c",
        "decode-c": "c",
    }
    assert spec.pools_by_load() == {"c": {Role.DECODE: "decode-c"}}
    assert {*map(place_of, spec.scaled({"decode-org_a-b": 2}).processes())} == {
        *("router-0", "prefill-org_a-b-0", "decode-org_a-b-0", "decode-org_a-b-1"),
        *("prefill-c-0", "decode-c-0", "decode-c-1", "decode-c-2"),
    }
    with pytest.raises(ConfigError, match="all workers would go"):
        spec_of().upgraded(spec)
    with pytest.raises(ConfigError, match="too much alike"):
        spec_of(up__models=[{"model_names": [name]} for name in ("a/b", "a b")])


def test_as_many_workers_are_warm_as_may_run_later() -> None:
    decode = {"workers": 1, "max_workers": 4, "warm_workers": 2}
    spec = spec_of(up__decode=decode)
    for count, warm in ((1, {1, 2}), (3, {3}), (4, set())):
        counted = structs.replace(spec, counts={**spec.counts, "decode": count})
        assert counted.warm_places() == {f"decode-{i}" for i in warm}


def test_a_model_at_zero_workers_starts_with_an_upgrade() -> None:
    spec = spec_of(up__scaling__to_zero_after_s=60)
    assert spec.pools_by_load() == {
        "pdserve-demo": {Role.PREFILL: "prefill", Role.DECODE: "decode"}
    }
    stopped = structs.replace(spec, counts=dict.fromkeys(spec.counts, 0))
    assert (spec.at_zero(), stopped.at_zero()) == ([], ["pdserve-demo"])
    assert stopped.upgraded(spec).counts == spec.counts


def test_workers_are_spread_or_packed_where_they_fit() -> None:
    nodes = {"a": {"CPU": 8.0, "GPU": 2.0}, "b": {"CPU": 8.0, "GPU": 2.0}, "head": {}}
    bundle = {"CPU": 1.0, "GPU": 1.0}
    placed = [Placed("router-0-x", "a", {"CPU": 1.0}), Placed("decode-0-x", "b", bundle)]
    placed.append(Placed("prefill-0-x", "a", bundle))

    def node(strategy: str, *others: Placed) -> str | None:
        return choose_node("decode-1-x", bundle, strategy, nodes, [*placed, *others])

    assert (node("spread"), node("pack")) == ("a", "a")
    full = Placed("decode-2-x", "a", bundle)
    assert (node("spread", full), node("pack", full)) == ("b", "b")
    assert node("pack", full, Placed("decode-3-x", "b", bundle)) is None


def test_a_worker_over_several_nodes_takes_its_share_of_each() -> None:
    ranks = {"up__decode__nnodes": 2, "up__decode__engine_args": {"pipeline_parallel_size": 4}}
    spec = spec_of(worker__engine="vllm", **ranks)
    decode = spec.workers["decode"]
    assert (decode.nnodes, decode.bundle) == (2, {"CPU": 0.5})
    assert spec.workers["prefill"].nnodes == 1
    with pytest.raises(ConfigError, match=r"^up\.decode\.nnodes: .*with the engine fake"):
        spec_of(**ranks)


def test_each_rank_of_a_data_parallel_group_takes_the_share_of_a_worker() -> None:
    decode = spec_of(worker__engine="vllm", up__decode__data_parallel_size=4).workers["decode"]
    assert (decode.ranks, decode.parts, decode.bundle) == (4, 4, {"CPU": 1.0})
    for changes, why in (
        ({"worker__engine": "fake"}, "with the engine fake"),
        (
            {"up__decode__nnodes": 2, "up__decode__engine_args": {"tensor_parallel_size": 2}},
            "with nodes.count above 1",
        ),
    ):
        with pytest.raises(ConfigError, match=rf"^up\.decode\.data_parallel_size: .*{why}"):
            spec_of(up__decode__data_parallel_size=2, **{"worker__engine": "vllm"} | changes)
