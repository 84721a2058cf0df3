"""Settings of the KV plane. A worker passes them through vLLM's `kv_connector_extra_config`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pdserve.config import KvConfig, TiersConfig, parse, refuse

if TYPE_CHECKING:
    from collections.abc import Mapping

# Value of `transports`: all that can move a KV cache in this memory.
AUTO = "auto"
# Transports for a KV cache in GPU memory, and for one in host memory; best first.
ON_GPU = ("cuda_ipc", "nccl")
ON_HOST = ("shm", "tcp")
# Transports that work only between processes of one host.
LOCAL = ("shm", "cuda_ipc")
# Copies and digests that run at once in GPU memory, of all links. Each holds two chunks.
DEVICE_COPIES = 2
# Chunks that a link copies or sends at once, and chunks that are digested at once.
MAX_IN_FLIGHT = 4
# How often a thread that waits for a message looks for chunks that have ended.
INPUT_POLL_S = 0.001
# NCCL: staging slots in each direction, outside the KV cache. A slot holds at least one block.
SLOTS, SLOT_BYTES = 4, 32 << 20


class ConnectorConfig(KvConfig, frozen=True):
    """`worker.kv`, and the keys that only the connector has.

    tls_cert_file: Credentials of links are those of `access` (protocol/auth.py).
    tls_key_file: As above.
    tls_ca_file: As above.
    token_file: File of the worker token.
    """

    tls_cert_file: str = ""
    tls_key_file: str = ""
    tls_ca_file: str = ""
    token_file: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tls_cert_file and not (self.tls_key_file and self.tls_ca_file):
            refuse("tls_cert_file", "needs tls_key_file and tls_ca_file")
        # TierConnector has a configuration of its own.
        if self.tiers != TiersConfig():
            refuse("tiers", "is a key of pdserve's workers, not of this connector")

    def names(self, *, on_gpu: bool) -> tuple[str, ...]:
        """Return the transports that a KV cache in GPU or host memory should use, best first."""
        if self.transports == (AUTO,):
            return ON_GPU if on_gpu else ON_HOST
        return self.transports

    @property
    def device_bytes(self) -> int:
        """GPU memory that the transports may hold outside the KV cache."""
        has_nccl = "nccl" in self.names(on_gpu=True)
        nccl = 2 * SLOTS * SLOT_BYTES + self.nccl_budget_bytes if has_nccl else 0
        return 2 * DEVICE_COPIES * self.chunk_bytes + nccl


def read_extra_config(extra: Mapping[str, Any]) -> ConnectorConfig:
    """Convert vLLM's `kv_connector_extra_config`, which a user of `vllm serve` writes by hand.

    Raises ConfigError naming the key that is unknown or wrong.
    """
    config = parse(ConnectorConfig, extra)
    if config.connector != "pdserve":
        refuse("connector", "is chosen by vLLM's kv_connector")
    return config
