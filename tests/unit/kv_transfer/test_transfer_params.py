"""`kv_transfer_params` as our router and vLLM's proxies write them."""

from __future__ import annotations

from typing import Any

import pytest

from kv_transfer.vllm.params import (
    ConsumerParams,
    ProducerParams,
    TransferParams,
    parse,
    prompt_digest_of,
)
from pdserve.errors import InvalidRequest

CONSUMER = ConsumerParams("t", ("a:1", "b:2"), "i")
OURS = {
    "role": "consumer",
    "transfer_id": "t",
    "producer_addresses": ["a:1"],
    "producer_instance_id": "i",
}
VLLMS = {**OURS, "do_remote_prefill": True, "role": None}


@pytest.mark.parametrize(
    "params",
    [
        TransferParams(),
        TransferParams(None, (1, 2)),
        TransferParams(ProducerParams("t"), (1,)),
        TransferParams(ProducerParams("t", resample=True)),
        TransferParams(CONSUMER, (3,)),
        TransferParams(ConsumerParams("t", ("a:1",), "i", live=True), (3,)),
        TransferParams(ConsumerParams("t", ("a:1",), "i", True, prompt_digest_of([1, 2]))),
    ],
)
def test_params_are_read_as_they_were_written(params: TransferParams) -> None:
    assert parse(params.to_dict()) == params


def test_transfer_parameters_of_vllms_own_connectors_are_accepted() -> None:
    noted = {"do_remote_decode": True, "do_remote_prefill": False, "remote_block_ids": None}
    assert parse(noted).part == ProducerParams("", resample=True)
    assert parse({**VLLMS, "remote_prefill_cached_tokens": 5}).part == ConsumerParams(
        "t", ("a:1",), "i", resample=True
    )
    assert parse({"do_remote_decode": False}) == parse(None) == TransferParams()
    assert prompt_digest_of([1, 2]) != prompt_digest_of([2, 1])


@pytest.mark.parametrize(
    ("params", "key"),
    [
        ({"role": "both"}, "role"),
        ({"role": "producer"}, "transfer_id"),
        ({"role": "producer", "transfer_id": ""}, "transfer_id"),
        ({"role": "producer", "transfer_id": "t" * 257}, "transfer_id"),
        ({"role": "producer", "transfer_id": "t", "live": True}, "live"),
        ({**OURS, "transfer_id": 5}, "transfer_id"),
        ({**OURS, "producer_addresses": []}, "producer_addresses"),
        ({**OURS, "producer_addresses": ["a"]}, "producer_addresses"),
        ({**OURS, "producer_addresses": ["a:1", "a:1"]}, "producer_addresses"),
        ({**OURS, "producer_instance_id": None}, "producer_instance_id"),
        ({**OURS, "live": True}, "live"),
        ({**OURS, "live": 1, "resume": [1]}, "live"),
        ({"resume": [-1]}, "resume"),
        ({"resume": [True]}, "resume"),
        ({"colour": "red"}, "colour"),
        ({"transfer_id": "t"}, "transfer_id"),
        ({"do_remote_decode": True, "do_remote_prefill": True}, "do_remote_prefill"),
        ({"do_remote_decode": 1}, "do_remote_decode"),
        ({"do_remote_decode": True, "resume": [1]}, "resume"),
        ({**VLLMS, "live": True}, "live"),
        ({**VLLMS, "role": "consumer"}, "role"),
    ],
)
def test_wrong_params_are_refused_by_key(params: dict[str, Any], key: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(params)
    assert caught.value.field == f"kv_transfer_params.{key}"


def test_params_that_are_no_object_are_refused() -> None:
    params: Any = ["role"]
    with pytest.raises(InvalidRequest, match="must be an object"):
        parse(params)
