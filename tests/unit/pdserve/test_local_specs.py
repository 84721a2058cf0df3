"""From one configuration to processes: cores, addresses, and what the file may not choose."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path

import pytest
from msgspec.structs import replace

from pdserve.config import (
    Config,
    GrpcConfig,
    HttpConfig,
    RoleConfig,
    RouterConfig,
    ScaledRoleConfig,
    UnusedRoleConfig,
    UpConfig,
    WorkerConfig,
    parse,
    read_yaml,
)
from pdserve.deploy.local.progress import StartProgress
from pdserve.deploy.local.specs import (
    before_on_gpu,
    check_memory,
    core_pools,
    groups_of,
    router_configs,
    share_cores,
    worker_configs,
    worker_pools,
)
from pdserve.errors import ConfigError
from pdserve.net.sockets import reachable
from pdserve.process.gpus import Wanted, gpus_for, memory_share, share_gpus, visible_gpus
from pdserve.types import Role


@pytest.mark.parametrize(
    ("workers", "cores", "per_worker", "shares"),
    [
        (2, [0, 1], 0, [(0,), (1,)]),
        (1, [0, 1], 0, [(0, 1)]),
        (2, [3, 1], 0, [(1,), (3,)]),
        (3, [0, 1], 0, [(0,), (1,), (0,)]),
        (2, [0, 1, 2, 3], 0, [(0, 1), (2, 3)]),
        (2, [0, 1, 2, 3, 4], 0, [(0, 1), (2, 3)]),
        (2, range(9), 0, [(0, 1, 2, 3), (4, 5, 6, 7)]),
        (2, range(8), 2, [(0, 1), (2, 3)]),
    ],
)
def test_cores_are_shared_out(
    workers: int, cores: list[int], per_worker: int, shares: list[tuple[int, ...]]
) -> None:
    assert share_cores(workers, cores, per_worker) == shares


def test_more_cores_than_there_are_cannot_be_had() -> None:
    with pytest.raises(ConfigError, match=r"up\.cores_per_worker"):
        share_cores(2, range(3), 2)


def test_workers_are_named_by_role_and_pinned_apart() -> None:
    up = UpConfig(decode=RoleConfig(workers=2), aggregated=UnusedRoleConfig(workers=1))
    config = Config(up=up)
    workers = worker_configs(config, range(4))
    assert {name: (x.role, x.cores) for name, x in workers.items()} == {
        "prefill-0": (Role.PREFILL, (0,)),
        "decode-0": (Role.DECODE, (1,)),
        "decode-1": (Role.DECODE, (2,)),
        "aggregated-0": (Role.AGGREGATED, (3,)),
    }
    assert all(name == worker.worker_id for name, worker in workers.items())


@pytest.mark.parametrize(
    ("key", "worker"),
    [
        ("worker.worker_id", WorkerConfig(worker_id="mine")),
        ("worker.role", WorkerConfig(role=Role.DECODE)),
        ("worker.port", WorkerConfig(port=9000)),
        ("worker.cores", WorkerConfig(cores=(0,))),
        ("worker.gpus", WorkerConfig(gpus=(0,))),
        ("worker.routers", WorkerConfig(routers=("10.0.0.1:8001",))),
    ],
)
def test_keys_that_up_sets_are_refused_in_its_file(key: str, worker: WorkerConfig) -> None:
    with pytest.raises(ConfigError) as caught:
        worker_configs(Config(worker=worker), range(2))
    assert caught.value.field == key


@pytest.mark.parametrize(
    ("wanted", "gpus", "shares"),
    [
        ([((), 1)] * 2, [], [(), ()]),
        ([((), 1)] * 2, [0, 1], [(0,), (1,)]),
        ([((), 2)] * 2, [4, 5, 6, 7], [(4, 5), (6, 7)]),
        ([((), 1)] * 2, [3], [(3,), (3,)]),
        ([((), 1)] * 3, [0, 1], [(0,), (1,), (0,)]),
        ([((), 2), ((), 4)], range(6), [(0, 1), (2, 3, 4, 5)]),
        ([((), 2), ((), 4)], range(4), [(0, 1), (0, 1, 2, 3)]),
        ([((2, 3), 1), ((2, 3), 1), ((), 2)], range(4), [(2,), (3,), (0, 1)]),
    ],
)
def test_gpus_are_shared_out(
    wanted: list[Wanted], gpus: list[int], shares: list[tuple[int, ...]]
) -> None:
    assert share_gpus(wanted, gpus) == shares


def test_a_worker_cannot_have_more_gpus_than_there_are() -> None:
    with pytest.raises(ConfigError, match="a worker needs 3 GPUs") as caught:
        share_gpus([((), 3)], [0, 1])
    assert caught.value.field == "worker.engine_args.tensor_parallel_size"


def test_each_role_has_its_own_engine_arguments_and_gpus() -> None:
    text = """
    worker: {engine_args: {max_model_len: 64, seed: 1}}
    up:
      prefill: {workers: 2, gpus: [4, 5, 6, 7], engine_args: {tensor_parallel_size: 2}}
      decode: {engine_args: {tensor_parallel_size: 2, pipeline_parallel_size: 2}}
    """
    workers = worker_configs(
        parse(Config, read_yaml(text, "test")), range(3), dict.fromkeys(range(8), ())
    )
    common = {"max_model_len": 64, "seed": 1}
    assert {name: (x.gpus, x.engine_args) for name, x in workers.items()} == {
        "prefill-0": ((4, 5), common | {"tensor_parallel_size": 2}),
        "prefill-1": ((6, 7), common | {"tensor_parallel_size": 2}),
        "decode-0": (
            (0, 1, 2, 3),
            common | {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
        ),
    }


def test_several_models_have_workers_of_their_own() -> None:
    text = """
    worker: {engine_args: {seed: 1}}
    up:
      models:
        - {model: /models/a, model_names: [a, gpt], engine_args: {seed: 2}}
        - {model: /models/b, prefill: {workers: 0}, decode: {workers: 0}, aggregated: {workers: 1}}
        - {model: /models/c, adapters: {x: /adapters/x}}
    """
    workers = worker_configs(parse(Config, read_yaml(text, "test")), range(5))
    assert [
        (name, x.role, x.served_names, x.engine_args["seed"]) for name, x in workers.items()
    ] == [
        ("prefill-0", Role.PREFILL, ("a", "gpt"), 2),
        ("decode-0", Role.DECODE, ("a", "gpt"), 2),
        ("aggregated-0", Role.AGGREGATED, ("b",), 1),
        ("prefill-1", Role.PREFILL, ("c",), 1),
        ("decode-1", Role.DECODE, ("c",), 1),
    ]
    assert [len(x.adapters) for x in workers.values()] == [0, 0, 0, 1, 1]


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("up: {prefill: {gpus: [9]}}", "up.prefill.gpus"),
        ("up: {models: [{model: a}, {decode: {gpus: [2, 3]}}]}", "up.models[1].decode.gpus"),
        ("up: {models: [{model: a}], decode: {workers: 2}}", "up.decode"),
        ("{up: {models: [{model: a}]}, worker: {model: b}}", "worker.model"),
        ("up: {models: [{model: a}, {model: b, model_names: [a]}]}", "up.models"),
        ("{up: {models: [{model: a}]}, worker: {adapters: {x: y}}}", "worker.adapters"),
        ("worker: {model_names: [x], adapters: {x: y}}", "worker.adapters"),
        ("up: {models: [{model: a, decode: {workers: 0}}]}", "up.models[0].decode.workers"),
    ],
)
def test_a_configuration_that_cannot_be_served_is_refused_by_key(text: str, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        worker_configs(parse(Config, read_yaml(text, "test")), range(4), {0: (), 1: ()})
    assert caught.value.field == key


def test_workers_on_one_gpu_share_its_memory_by_default() -> None:
    assert memory_share((0,), [(0,), (1,)]) is None
    assert memory_share((), [(), ()]) is None
    workers = worker_configs(Config(), range(2), {0: ()})
    assert [dict(x.engine_args) for x in workers.values()] == [
        {"max_model_len": -1, "gpu_memory_utilization": 0.45}
    ] * 2
    told = Config(worker=WorkerConfig(engine_args={"kv_cache_memory_bytes": 1 << 30}))
    for worker in worker_configs(told, range(2), {0: ()}).values():
        assert worker.engine_args == told.worker.engine_args
        assert worker.gpus == (0,)


def test_gpus_are_for_a_vllm_that_uses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = {0: frozenset({0}), 1: frozenset[int]()}
    monkeypatch.setattr("pdserve.process.gpus.visible_gpus", lambda: gpus)
    monkeypatch.setattr("pdserve.process.gpus.version", lambda name: "2.13.0+cu130")
    assert gpus_for(Config()) == gpus
    assert gpus_for(Config(worker=WorkerConfig(engine="fake"))) == {}
    monkeypatch.setattr("pdserve.process.gpus.version", lambda name: "2.13.0+cpu")
    assert gpus_for(Config()) == {}


class AffinityNvml:
    """NVML with 72 cores: GPU 0 is near the first and the last, GPU 1 does not report it."""

    class NVMLError(Exception):
        pass

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:  # noqa: N802
        return f"GPU-{handle}"

    def nvmlDeviceGetCpuAffinity(self, handle: int, words: int) -> list[int]:  # noqa: N802
        if handle:
            raise self.NVMLError
        return [1 << 0, 1 << 7][:words]


def test_each_visible_gpu_comes_with_its_nearest_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdserve.process.gpus.open_nvml", lambda: nullcontext(AffinityNvml()))
    monkeypatch.setattr("os.cpu_count", lambda: 72)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_gpus() == {0: {0, 71}, 1: set()}


SOCKETS = (frozenset(range(8)), frozenset(range(8, 16)))


@pytest.mark.parametrize(
    ("gpus", "nearest", "per_worker", "pools"),
    [
        # One GPU a socket, and both on the second one.
        ([(0,), (1,)], SOCKETS, 0, SOCKETS),
        ([(0,), (1,)], (SOCKETS[1], SOCKETS[1]), 0, (SOCKETS[1], SOCKETS[1])),
        ([(0, 1), (2,)], (SOCKETS[0], SOCKETS[0], SOCKETS[1]), 0, SOCKETS),
        # GPUs of both sockets; too few cores; cores of others; no GPU; unknown.
        ([(0, 1), (1,)], SOCKETS, 0, None),
        ([(0,), (1,)], (SOCKETS[1], SOCKETS[1]), 5, None),
        ([(0,), (1,)], ({0, 1, 2}, {3, 4, 5, 6}), 0, None),
        ([(0,), (1,)], ({99}, {99}), 0, None),
        ([(), ()], (), 0, None),
        ([(0,), (0,)], ((),), 0, None),
    ],
)
def test_workers_run_on_the_socket_of_their_gpus(
    gpus: list[tuple[int, ...]],
    nearest: tuple[frozenset[int], ...],
    per_worker: int,
    pools: tuple[frozenset[int], ...] | None,
) -> None:
    found = core_pools(gpus, range(16), dict(enumerate(nearest)), per_worker)
    assert found == list(pools or [frozenset(range(16))] * 2)


def test_workers_of_one_socket_share_its_cores() -> None:
    workers = worker_configs(Config(), range(16), {0: SOCKETS[1], 1: SOCKETS[1]}).values()
    assert [(x.gpus, x.cores) for x in workers] == [((0,), (8, 9, 10)), ((1,), (11, 12, 13))]


def test_routers_side_by_side_have_ports_of_their_own() -> None:
    router = RouterConfig(http=HttpConfig(port=0), grpc=GrpcConfig(port=8001))
    assert router_configs(Config(router=router)) == {"router": router}
    config = Config(up=UpConfig(routers=3), router=router)
    ports = {name: (x.http.port, x.grpc.port) for name, x in router_configs(config).items()}
    assert ports == {"router-0": (0, 8001), "router-1": (0, 8011), "router-2": (0, 8021)}
    for key, router in (
        ("router.http.port", RouterConfig(http=HttpConfig(port=65520))),
        ("router.http.port", RouterConfig(http=HttpConfig(port=8000), grpc=GrpcConfig(port=8010))),
        ("router.http.port", RouterConfig(http=HttpConfig(shared_port=8010))),
    ):
        with pytest.raises(ConfigError) as caught:
            router_configs(Config(up=UpConfig(routers=3), router=router))
        assert caught.value.field == key


@pytest.mark.parametrize(
    ("address", "seen"),
    [
        ("0.0.0.0:80", "127.0.0.1:80"),
        ("[::]:80", "[::1]:80"),
        ("10.1.2.3:80", "10.1.2.3:80"),
        ("host:80", "host:80"),
    ],
)
def test_a_server_on_every_address_is_reached_on_the_loopback(address: str, seen: str) -> None:
    assert reachable(address) == seen


def test_workers_start_one_after_the_other_on_a_gpu_that_they_share() -> None:
    gpus = {"a": (0,), "b": (0, 1), "c": (1,), "d": (2,), "e": ()}
    workers = {name: WorkerConfig(worker_id=name, gpus=mine) for name, mine in gpus.items()}
    before = {name: before_on_gpu(workers, name) for name in (*gpus, "router")}
    assert before == {"a": [], "b": ["a"], "c": ["b"], "d": [], "e": [], "router": []}


def test_a_start_is_given_up_for_want_of_progress_alone() -> None:
    now, moved = 0.0, {1: 0, 2: 0}
    progress = StartProgress(lambda: now, moved.__getitem__)
    for now in range(0, 1000, 10):
        moved[1] += 2 << 20  # it downloads
        moved[2] += 50  # it logs that nobody answers
        assert progress.stuck({"a": (1, 0), "b": (2, now), "c": (0, 0)}, 20.0) == []
    now += 10
    assert progress.stuck({"b": (2, 990)}, 20.0) == []
    now += 10
    assert progress.stuck({"b": (2, 990), "c": (0, 0)}, 20.0) == ["b"]


def test_a_data_parallel_group_has_a_worker_for_each_rank() -> None:
    up = UpConfig(decode=ScaledRoleConfig(workers=2, data_parallel_size=2))
    config = Config(up=up)
    workers = worker_configs(config, range(8))
    assert {
        name: (x.data_parallel.rank, x.data_parallel.size, x.data_parallel.group)
        for name, x in workers.items()
    } == {
        "prefill-0": (0, 1, ""),
        "decode-0": (0, 2, "decode-0"),
        "decode-1": (1, 2, "decode-0"),
        "decode-2": (0, 2, "decode-2"),
        "decode-3": (1, 2, "decode-2"),
    }
    assert groups_of(workers) == [("decode-0", "decode-1"), ("decode-2", "decode-3")]
    assert {pool.role: (len(pool.names), pool.least) for pool in worker_pools(config)} == {
        Role.PREFILL: (1, 1),
        Role.DECODE: (4, 4),
        Role.AGGREGATED: (0, 0),
        Role.POOLING: (0, 0),
        Role.ENCODE: (0, 0),
    }


def test_each_rank_of_a_group_has_its_own_gpus() -> None:
    ranks = ScaledRoleConfig(
        data_parallel_size=2, gpus=(0, 1, 2, 3), engine_args={"tensor_parallel_size": 2}
    )
    config = Config(up=UpConfig(prefill=ScaledRoleConfig(gpus=(0,)), decode=ranks))
    gpus = dict.fromkeys(range(4), range(8))
    workers = worker_configs(config, range(8), gpus)
    assert [workers[f"decode-{i}"].gpus for i in range(2)] == [(0, 1), (2, 3)]
    few = Config(up=replace(config.up, decode=replace(ranks, gpus=(1, 2))))
    with pytest.raises(ConfigError, match="each rank needs GPUs of its own") as caught:
        worker_configs(few, range(8), gpus)
    assert caught.value.field == "up.decode.data_parallel_size"


def test_the_configuration_of_a_large_model_with_experts_in_the_documents_is_valid() -> None:
    page = (Path(__file__).parents[3] / "docs" / "deploy.md").read_text("utf-8")
    section = page.partition("## A model with experts")[2].partition("\n## ")[0]
    one_machine, rank = (x.partition("```")[0] for x in section.split("```yaml")[1:])
    config = parse(Config, read_yaml(one_machine, "deploy.md"))
    workers = worker_configs(config, range(48), dict.fromkeys(range(24), range(48)))
    prefill, decode = groups_of(workers)
    assert [workers[name].gpus for name in prefill] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert [workers[name].gpus for name in decode] == [(gpu,) for gpu in range(8, 24)]
    whole, at = parse(Config, read_yaml(rank, "deploy.md")).worker, workers[decode[0]]
    args = {"enable_expert_parallel", "max_model_len", "max_num_seqs"}
    assert whole.engine_args == {name: at.engine_args[name] for name in args}
    assert (whole.role, whole.data_parallel.size) == (at.role, at.data_parallel.size)


def test_workers_that_do_not_fit_the_free_memory_are_refused_by_numbers(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    os.truncate(tmp_path / "model.safetensors", 3 << 30)
    args = {"kv_cache_memory_bytes": 1 << 30}
    worker = WorkerConfig(model=str(tmp_path), model_names=("m",), engine_args=args)
    up = UpConfig(decode=ScaledRoleConfig(workers=1, max_workers=4))
    config = Config(worker=worker, up=up)
    workers, pools = worker_configs(config, range(8)), worker_pools(config)
    check_memory(workers, pools, 10 << 30)
    with pytest.raises(
        ConfigError,
        match=r"^up: the workers need 9\.0 GiB of memory, and 8\.0 GiB are free \(prefill-0: "
        r"weights 3\.0, KV cache 1\.0, engine 0\.5; decode-0: ",
    ):
        check_memory(workers, pools, 8 << 30)
