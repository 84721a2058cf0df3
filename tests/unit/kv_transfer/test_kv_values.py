"""Parameters, settings and layouts: what is wrong is refused by name."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.layout import KvGeometry, compatibility, runs
from kv_transfer.settings import KvSettings, from_extra_config
from kv_transfer.vllm.params import (
    MAX_TEXT,
    SourceParams,
    TargetParams,
    TransferParams,
    digest_of,
    parse,
)
from pdserve.capability import KEY_BYTES, CapabilityKey
from pdserve.errors import ConfigError, InvalidRequest

KEY = CapabilityKey(b"k" * KEY_BYTES)
TARGET = {
    "role": "target",
    "transfer_id": "t",
    "producer_addresses": ["127.0.0.1:5000"],
    "producer_instance_id": "e",
}
FETCH = {
    "do_remote_prefill": True,
    "transfer_id": "t",
    "producer_addresses": ["h:1"],
    "producer_instance_id": "e",
}


@pytest.mark.parametrize(
    "params",
    [
        TransferParams(),
        TransferParams(resume=(1, 2)),
        TransferParams(SourceParams("t")),
        TransferParams(SourceParams("t"), (3,)),
        TransferParams(TargetParams("t", ("host:1",), "e"), (0,)),
        TransferParams(TargetParams("t", ("host:1", "host:2"), "e", "1.right"), (0,)),
        TransferParams(TargetParams("t" * MAX_TEXT, ("[::1]:65535",), "e")),
        TransferParams(TargetParams("t", ("host:1",), "e", prompt_digest=digest_of([1, 2]))),
        TransferParams(TargetParams("t", ("host:1",), "e", live=True), (3, 4)),
        TransferParams(SourceParams("", resample=True)),
        TransferParams(SourceParams("t", resample=True)),
        TransferParams(TargetParams("t", ("host:1",), "e", "1.right", True, digest_of([]))),
    ],
)
def test_transfer_params_are_read_as_they_were_written(params: TransferParams) -> None:
    assert parse(params.to_dict()) == params


NOTHING = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))


@pytest.mark.parametrize(
    ("params", "part"),
    [
        ({"do_remote_decode": True, "do_remote_prefill": False}, SourceParams("", resample=True)),
        ({"do_remote_prefill": False, "do_remote_decode": None}, None),
        (
            {**FETCH, "do_remote_decode": False, "remote_prefill_cached_tokens": 3},
            TargetParams("t", ("h:1",), "e", resample=True),
        ),
    ],
)
def test_what_proxies_write_for_vllms_own_connectors_is_understood(
    params: dict[str, Any], part: SourceParams | TargetParams | None
) -> None:
    assert parse({**params, **NOTHING}).part == part


def test_a_digest_tells_prompts_apart() -> None:
    prompts = [[], [0], [0, 0], [1, 2], [2, 1], [1 << 17, 1]]
    assert len({digest_of(prompt) for prompt in prompts}) == len(prompts)


def test_no_transfer_params_ask_for_nothing() -> None:
    assert parse(None) == TransferParams()


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"role": "both"}, "role"),
        ({"role": ["source"]}, "role"),
        ({"role": "source"}, "transfer_id"),
        ({"role": "source", "transfer_id": ""}, "transfer_id"),
        ({"role": "source", "transfer_id": 7}, "transfer_id"),
        ({"role": "source", "transfer_id": "t" * (MAX_TEXT + 1)}, "transfer_id"),
        (
            {"role": "source", "transfer_id": "t", "producer_instance_id": "e"},
            "producer_instance_id",
        ),
        ({"transfer_id": "t"}, "transfer_id"),
        ({"do_remote_prefill": True}, "transfer_id"),
        ({"do_remote_prefill": 1}, "do_remote_prefill"),
        ({"do_remote_decode": "true"}, "do_remote_decode"),
        ({"do_remote_prefill": True, "do_remote_decode": True}, "do_remote_prefill"),
        ({**FETCH, "producer_instance_id": None}, "producer_instance_id"),
        ({**FETCH, "prompt_digest": 7}, "prompt_digest"),
        ({**FETCH, "role": "target"}, "role"),
        ({**FETCH, "resume": [1]}, "resume"),
        ({**FETCH, "remote_engine_id": "e"}, "remote_engine_id"),
        ({"do_remote_decode": True, "producer_instance_id": "e"}, "producer_instance_id"),
        ({"do_remote_decode": False, "transfer_id": "t"}, "transfer_id"),
        ({**TARGET, "transfer_id": None}, "transfer_id"),
        ({**TARGET, "producer_instance_id": ""}, "producer_instance_id"),
        ({**TARGET, "capability": ""}, "capability"),
        ({**TARGET, "capability": None}, "capability"),
        ({**TARGET, "capability": "c" * (MAX_TEXT + 1)}, "capability"),
        ({"role": "source", "transfer_id": "t", "capability": "c"}, "capability"),
        ({**TARGET, "producer_addresses": [""]}, "producer_addresses"),
        ({**TARGET, "producer_addresses": ["nowhere"]}, "producer_addresses"),
        ({**TARGET, "producer_addresses": [":80"]}, "producer_addresses"),
        ({**TARGET, "producer_addresses": ["host:"]}, "producer_addresses"),
        ({**TARGET, "producer_addresses": ["host:http"]}, "producer_addresses"),
        ({**TARGET, "producer_addresses": ["host:0"]}, "producer_addresses"),
        ({**TARGET, "producer_addresses": ["host:65536"]}, "producer_addresses"),
        ({**TARGET, "producer_addresses": ["host:-1"]}, "producer_addresses"),
        ({**TARGET, "producer_addresses": ["host:٣"]}, "producer_addresses"),
        ({**TARGET, "producer_addresses": "host:1"}, "producer_addresses"),
        ({**TARGET, "producer_addresses": []}, "producer_addresses"),
        ({**TARGET, "producer_addresses": [7]}, "producer_addresses"),
        ({**TARGET, "producer_addresses": ["h:1", "h:2", "h:1"]}, "producer_addresses"),
        ({**TARGET, "producer_addresses": ["h" * MAX_TEXT + ":1"]}, "producer_addresses"),
        (
            {**TARGET, "producer_addresses": [f"h:{i}" for i in range(1, 1026)]},
            "producer_addresses",
        ),
        ({**TARGET, "live": True}, "live"),
        ({**TARGET, "live": 1, "resume": [3]}, "live"),
        ({**FETCH, "live": True}, "live"),
        ({"resume": [3], "live": True}, "live"),
        ({"resume": 1}, "resume"),
        ({"resume": ["1"]}, "resume"),
        ({"resume": [True]}, "resume"),
        ({"resume": [-1]}, "resume"),
    ],
)
def test_wrong_transfer_params_are_refused_by_key(params: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(params)
    assert caught.value.field == f"kv_transfer_params.{field}"


@pytest.mark.parametrize("params", ["source", 1, [1], [["role", "source"]]])
def test_transfer_params_that_are_no_object_are_refused(params: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(params)
    assert caught.value.field == "kv_transfer_params"


def test_transports_between_gpus_may_hold_staging_and_communicators() -> None:
    sizes = {"staging_slots": 3, "staging_slot_bytes": 10, "nccl_budget_bytes": 1000}
    assert KvSettings(**sizes).device_bytes == 1060
    for transports, held_bytes in (
        (("shm", "tcp"), 0),
        (("nccl",), 1060),
    ):
        assert KvSettings(transports=transports, **sizes).device_bytes == held_bytes
    with pytest.raises(ConfigError, match="must be 'auto' alone"):
        KvSettings(transports=("auto", "tcp"))


def test_settings_are_read_from_the_extra_config() -> None:
    settings = from_extra_config({"transports": ["tcp"], "lease_s": 3, "chunk_bytes": 1024})
    assert settings == KvSettings(transports=("tcp",), lease_s=3, chunk_bytes=1024)


@pytest.mark.parametrize(
    ("config", "checks"),
    [
        ({}, False),
        ({"worker_id": "p0"}, False),
        ({"require_capability": False}, False),
        ({"worker_id": "p0", "kv_key": KEY.reveal().hex()}, True),
        ({"worker_id": "p0", "kv_key": KEY, "require_capability": True}, True),
        ({"worker_id": "p0", "kv_key": KEY, "require_capability": None}, True),
        ({"kv_key": KEY, "require_capability": False}, False),
    ],
)
def test_capabilities_are_checked_with_a_key_unless_it_is_turned_off(
    config: dict[str, Any], checks: bool
) -> None:
    settings = from_extra_config(config)
    assert settings.checks_capabilities is checks
    assert settings.kv_key in {None, KEY}
    assert KEY.reveal().hex() not in repr(settings)


@pytest.mark.parametrize("text", ["zz" * KEY_BYTES, "5ec2e7" * 3])
def test_a_key_that_is_none_is_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_extra_config({"worker_id": "p0", "kv_key": text})
    assert text not in str(caught.value)


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"nonsense": 1}, "nonsense"),
        ({"kv_key": ""}, "kv_key"),
        ({"kv_key": "00"}, "kv_key"),
        ({"kv_key": b"k" * KEY_BYTES}, "kv_key"),
        ({"kv_key": KEY}, "worker_id"),
        ({"worker_id": None}, "worker_id"),
        ({"worker_id": "p" * 257}, "worker_id"),
        ({"require_capability": True}, "require_capability"),
        ({"require_capability": "no"}, "require_capability"),
        ({"lease_s": 0}, "lease_s"),
        ({"lease_s": -1.0}, "lease_s"),
        ({"lease_s": "30"}, "lease_s"),
        ({"lease_s": None}, "lease_s"),
        ({"lease_s": True}, "lease_s"),
        ({"receive_timeout_s": float("nan")}, "receive_timeout_s"),
        ({"cancel_timeout_s": float("inf")}, "cancel_timeout_s"),
        ({"handshake_timeout_s": []}, "handshake_timeout_s"),
        ({"send_timeout_s": 0.0}, "send_timeout_s"),
        ({"preempt_timeout_s": 0}, "preempt_timeout_s"),
        ({"chunk_bytes": 0}, "chunk_bytes"),
        ({"chunk_bytes": 0.5}, "chunk_bytes"),
        ({"transports": []}, "transports"),
        ({"transports": "shm"}, "transports"),
        ({"transports": [1]}, "transports"),
        ({"transports": None}, "transports"),
        ({"host": ""}, "host"),
        ({"host": 1}, "host"),
    ],
)
def test_wrong_settings_are_refused_by_key(config: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_extra_config(config)
    assert caught.value.field == f"kv.{field}"


@given(
    st.integers(1, 5),
    st.integers(1, 9),
    st.integers(1, 32),
    st.integers(0, 7),
    st.booleans(),
    st.integers(0, 64),
)
def test_every_page_lies_in_the_span_and_none_overlaps_another(
    layers: int, blocks: int, page: int, gap: int, layers_inside: bool, offset: int
) -> None:
    """Both orders that vLLM uses: blocks within a layer, and layers within a block."""
    unit = page + gap
    layer_stride, block_stride = (unit, layers * unit) if layers_inside else (blocks * unit, unit)
    g = KvGeometry(layers, blocks, page, layer_stride, block_stride, offset)
    starts = sorted(g.page_offset(layer, b) for layer in range(layers) for b in range(blocks))
    assert starts[0] == offset
    assert starts[-1] + page == g.span_bytes
    assert all(b - a >= page for a, b in pairwise(starts))
    assert g.block_bytes == layers * page
    assert KvGeometry.from_list(g.to_list()) == g


@pytest.mark.parametrize(
    "values",
    [
        [],
        [1, 1, 1, 1, 1],
        [1, 1, 1, 1, 1, 1, 1],
        [0, 1, 1, 1, 1, 0],
        [1, 0, 1, 1, 1, 0],
        [1, 1, 0, 1, 1, 0],
        [1, 1, 1, -1, 1, 0],
        [1, 1, 1, 1, 1, "0"],
        [1, 1, 1, 1, 1, 0.0],
        [True, 1, 1, 1, 1, 0],
    ],
)
def test_numbers_that_are_no_geometry_are_refused(values: list[Any]) -> None:
    with pytest.raises(ValueError, match="a geometry"):
        KvGeometry.from_list(values)


@pytest.mark.parametrize(
    ("ids", "known"),
    [([], True), ([0, 3], True), ([4], False), ([-1], False), ([0, 1 << 70], False)],
)
def test_a_geometry_knows_its_blocks(ids: list[int], known: bool) -> None:
    assert KvGeometry(1, 4, 8, 32, 8).has_blocks(ids) is known


def test_compatibility_is_of_the_whole_layout_and_of_no_order() -> None:
    base = {"dtype": "bfloat16", "model": "m"}
    assert compatibility(base) == compatibility(dict(reversed(base.items())))
    others = [
        {"dtype": "float32", "model": "m"},
        {"dtype": "bfloat16", "model": "n"},
        {"dtype": "bfloat16"},
        {"dtype": "bfloat16\nmodel=m"},
        {"dtype": "bfloat16", "model": "m", "more": ""},
    ]
    assert len({compatibility(layout) for layout in [base, *others]}) == len(others) + 1


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=30))
def test_runs_name_the_same_pairs_in_order_and_are_as_long_as_they_can_be(
    pairs: list[tuple[int, int]],
) -> None:
    found = runs([a for a, _ in pairs], [b for _, b in pairs])
    assert [(a + i, b + i) for a, b, n in found for i in range(n)] == pairs
    assert all(n > 0 for _, _, n in found)
    for (a, b, n), (c, d, _) in pairwise(found):
        assert (a + n, b + n) != (c, d)
