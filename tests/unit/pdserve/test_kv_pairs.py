"""Who can exchange KV with whom, and in what words it is said that two cannot."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from pdserve.kv_compatibility import exchange, kind_of, unpaired
from pdserve.types import KvEndpoint, Role
from tests.support.router_stack import worker_info

if TYPE_CHECKING:
    from pdserve.types import WorkerInfo

LAYOUT = {"connector": "pdserve 3", "model": "m:64x2", "dtype": "bfloat16", "block_size": "16"}


def worker(worker_id: str, role: Role, *, transports: str = "shm+tcp", **layout: Any) -> WorkerInfo:
    """Return LAYOUT with these changes; None removes a field."""
    has = {k: v for k, v in {**LAYOUT, **layout}.items() if v is not None}
    key = str(sorted(has.items()))
    kv = KvEndpoint(("127.0.0.1:1",), key, has, tuple(transports.split("+")))
    return replace(worker_info(worker_id, role), kv=kv)


PREFILL = worker("prefill-0", Role.PREFILL)


def test_equal_layouts_and_one_transport_in_common_suffice() -> None:
    decode = worker("decode-1", Role.DECODE, transports="tcp")
    assert exchange(kind_of(PREFILL), kind_of(decode))
    assert list(unpaired([PREFILL, decode])) == []


@pytest.mark.parametrize(
    ("differing", "reason"),
    [
        ({"dtype": "float16"}, "dtype: bfloat16 on prefill-0, float16 on decode-1"),
        ({"connector": "pdserve 2"}, "connector: pdserve 3 on prefill-0, pdserve 2 on decode-1"),
        (
            {"dtype": "float16", "block_size": "32"},
            (
                "dtype: bfloat16 on prefill-0, float16 on decode-1; "
                "block_size: 16 on prefill-0, 32 on decode-1"
            ),
        ),
        ({"packing": "amx"}, "packing: none on prefill-0, amx on decode-1"),
        ({"model": None}, "model: m:64x2 on prefill-0, none on decode-1"),
        ({"transports": "nccl"}, "transports: shm+tcp on prefill-0, nccl on decode-1"),
    ],
)
def test_the_reason_names_each_field_and_both_values(
    differing: dict[str, Any], reason: str
) -> None:
    decode = worker("decode-1", Role.DECODE, **differing)
    assert not exchange(kind_of(PREFILL), kind_of(decode))
    (pair,) = unpaired([decode, PREFILL])
    assert (pair.prefill, pair.decode) == (PREFILL, decode)
    assert pair.reason == reason


def test_keys_that_differ_without_a_field_that_does_are_the_reason_themselves() -> None:
    decode = replace(PREFILL, worker_id="decode-1", role=Role.DECODE)
    assert decode.kv is not None
    decode = replace(decode, kv=replace(decode.kv, compatibility="y"))
    (pair,) = unpaired([PREFILL, decode])
    assert pair.reason.startswith("compatibility: ")


def test_a_worker_without_kv_is_paired_with_none() -> None:
    decode = replace(worker("decode-1", Role.DECODE), kv=None)
    assert not exchange(kind_of(PREFILL), kind_of(decode))
    assert not exchange(kind_of(decode), kind_of(decode))
    (pair,) = unpaired([PREFILL, decode])
    assert pair.reason == "kv: an endpoint on prefill-0, no endpoint on decode-1"


def test_only_prefill_and_decode_of_one_model_are_compared() -> None:
    other = worker("decode-1", Role.DECODE, dtype="float16")
    elsewhere = replace(other, model=replace(other.model, name="another"))
    alike = [worker(f"prefill-{i}", Role.PREFILL, dtype=f"type {i}") for i in range(3)]
    assert list(unpaired([PREFILL, elsewhere, *alike])) == []
    found = [
        (x.prefill.worker_id, x.decode.worker_id) for x in unpaired([*alike, other, elsewhere])
    ]
    assert found == [(f"prefill-{i}", "decode-1") for i in range(3)]
