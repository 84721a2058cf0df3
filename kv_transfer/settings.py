"""Settings of the KV plane. A worker passes them through vLLM's `kv_connector_extra_config`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdserve.config import KvConfig, TiersConfig, parse, refuse, with_current_names

if TYPE_CHECKING:
    from collections.abc import Mapping

# Value of `transports`: all transports that can move a KV cache in this memory.
AUTO = "auto"
# Transports for a KV cache in GPU memory, and for one in host memory; best first.
ON_GPU = ("cuda_ipc", "nixl", "nccl")
ON_HOST = ("shm", "nixl", "tcp")
# Transports that work only between processes of one host.
LOCAL = ("shm", "cuda_ipc")
# Transports between hosts that cannot encrypt.
UNENCRYPTED = ("nccl", "nixl")
# Copies and digests that run at once in GPU memory, of all links. Each holds two chunks.
DEVICE_COPIES = 2
# Chunks that a link copies or sends at once, and chunks that are digested at once.
MAX_IN_FLIGHT = 4
# How often a thread that waits for a message checks for ended chunks.
INPUT_POLL_S = 0.001
# Bytes of blocks in GPU memory that are digested together: a digest needs a copy of them.
DIGEST_BYTES = 16 << 20
# NCCL: staging slots in each direction, outside the KV cache. A slot holds at least one block.
SLOTS, SLOT_BYTES = 4, 32 << 20
# NCCL: offers of a link that may be unanswered, each with a slot; and how many times `chunk_bytes`
# one send has, because each costs a handshake.
WINDOW, SEND_CHUNKS = 2, 4


_VERBS = Path("/dev/infiniband")


def rdma_devices() -> list[str]:
    """Return the RDMA devices that this process may use: InfiniBand, RoCE, EFA."""
    return sorted(path.name for path in _VERBS.glob("uverbs*"))


class ConnectorConfig(KvConfig, frozen=True):
    """`worker.kv`, and the keys that only the connector has.

    tls_cert_file: Credentials of links are those of `access` (protocol/auth.py).
    tls_key_file: As above.
    tls_ca_file: As above.
    token_file: File of the worker token.
    require_auth: `auto` uses no transport without authentication.
    """

    tls_cert_file: str = ""
    tls_key_file: str = ""
    tls_ca_file: str = ""
    token_file: str = ""
    require_auth: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tls_cert_file and not (self.tls_key_file and self.tls_ca_file):
            refuse("tls_cert_file", "needs tls_key_file and tls_ca_file")
        if self.tls and not self.tls_cert_file:
            refuse("tls", "needs tls_cert_file, tls_key_file and tls_ca_file")
        # TierConnector has its own configuration.
        if self.tiers != TiersConfig():
            refuse("tiers", "is a key of pdserve's workers, not of this connector")

    def names(self, *, on_gpu: bool) -> tuple[str, ...]:
        """Return the transports that a KV cache in GPU or host memory should use, best first.

        Without RDMA, NIXL is no faster than the others. It has no authentication.
        """
        if self.transports != (AUTO,):
            return self.transports
        left_out = set(UNENCRYPTED) if self.tls else set()
        if self.require_auth or not rdma_devices():
            left_out.add("nixl")
        return tuple(x for x in (ON_GPU if on_gpu else ON_HOST) if x not in left_out)

    @property
    def shared_by_peers(self) -> dict[str, str]:
        """Return the settings that two workers must share to exchange KV. Part of the layout, so
        routers do not pair others."""
        return {"kv.tls": "true"} if self.tls else {}

    @property
    def device_bytes(self) -> int:
        """GPU memory that the transports may hold outside the KV cache."""
        has_nccl = "nccl" in self.names(on_gpu=True)
        nccl = 2 * SLOTS * SLOT_BYTES + self.nccl_budget_bytes if has_nccl else 0
        return 2 * DEVICE_COPIES * max(self.chunk_bytes, DIGEST_BYTES) + nccl


def read_extra_config(extra: Mapping[str, Any]) -> ConnectorConfig:
    """Convert vLLM's `kv_connector_extra_config`, which a user of `vllm serve` writes by hand.

    Raises ConfigError naming the key that is unknown or wrong.
    """
    current = with_current_names({"worker": {"kv": extra}})
    return parse(ConnectorConfig, current["worker"]["kv"])
