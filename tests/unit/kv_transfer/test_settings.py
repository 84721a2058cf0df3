"""`kv_connector_extra_config`, written by a worker from its configuration, or by a user of `vllm
serve`."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kv_transfer.settings import ConnectorConfig, read_extra_config
from pdserve.errors import ConfigError


@pytest.mark.parametrize(
    ("extra", "field", "reason"),
    [
        ({"lease_seconds": 3}, "lease_seconds", "unknown key; keys are .*hold_s"),
        ({"hold_s": 0}, "hold_s", "0.1"),
        ({"hold_s": "long"}, "hold_s", "float"),
        ({"receive_timeout_s": 0}, "receive_timeout_s", ">= 0.001"),
        ({"transports": ["tcp", "rdma"]}, "transports[1]", "choose one of auto, shm, tcp"),
        ({"transports": ["auto", "tcp"]}, "transports", "only entry"),
        ({"tls_cert_file": "cert.pem"}, "tls_cert_file", "needs tls_key_file and tls_ca_file"),
        ({"tiers": {"host_gib": 1}}, "tiers", "not of this connector"),
    ],
)
def test_a_wrong_key_is_refused_by_name(extra: dict[str, Any], field: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as raised:
        read_extra_config(extra)
    assert raised.value.field == field


def test_all_keys_pass_through_vllm() -> None:
    sent = ConnectorConfig(transports=("tcp", "shm"), hold_s=7, token_file="token")
    assert read_extra_config(msgspec.to_builtins(sent)) == sent
    assert read_extra_config({}) == ConnectorConfig()
    assert read_extra_config({"lease_s": 7}) == ConnectorConfig(hold_s=7)  # its old name
