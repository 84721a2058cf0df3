"""Settings of the KV plane, as they come through vLLM's `kv_connector_extra_config`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta, Struct

from pdserve.config import Lease, Text, parse, refuse

if TYPE_CHECKING:
    from collections.abc import Mapping

# In the place of transports: those that suit where the KV cache is.
AUTO = "auto"
# Those that move a cache in GPU memory, and those that move one in host memory, best first.
ON_GPU = ("cuda_ipc", "nccl")
ON_HOST = ("shm", "tcp")
# Those that work only between processes of one host.
LOCAL = ("shm", "cuda_ipc")
# NCCL: staging slots in each direction, beside the KV cache. A slot holds at least one block.
SLOTS, SLOT_BYTES = 4, 32 << 20

_Timeout = Annotated[float, Meta(gt=0, le=86400)]
_Bytes = Annotated[int, Meta(ge=1, le=1 << 40)]


class KvSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Times in seconds, sizes in bytes.

    host: Address at which other workers reach this one's KV.
    transports: In order of preference: AUTO alone, or names.
    shared_dir: Directory through which workers of this host pass their memory to one another.
        Containers must mount the same one. Empty: the one for temporary files.
    lease_s: How long a producer holds blocks for a consumer that does not fetch them.
    receive_timeout_s: How long a consumer waits without progress before it fails a transfer.
    handshake_timeout_s: How long two workers may take from connecting to agreeing on a transport:
        milliseconds, but a peer whose engine compiles in its first step lets its other threads run
        seldom.
    send_timeout_s: How long a peer may read nothing before its link is closed.
    preempt_timeout_s: How long a step waits for copies of preempted blocks before their links are
        closed.
    chunk_bytes: Blocks are sent, and digested, in chunks of about this size.
    tls_cert_file: Credentials of links are those of `access` (protocol/auth.py).
    tls_key_file: As above.
    tls_ca_file: As above.
    token_file: File of the worker token.
    nccl_budget_bytes: GPU memory of all NCCL communicators.
    nccl_max_ctas: Thread blocks of each NCCL communicator.
    """

    host: Text = "127.0.0.1"
    transports: Annotated[tuple[Text, ...], Meta(min_length=1)] = (AUTO,)
    shared_dir: str = ""
    lease_s: Lease = 30.0
    receive_timeout_s: _Timeout = 30.0
    handshake_timeout_s: _Timeout = 15.0
    send_timeout_s: _Timeout = 20.0
    preempt_timeout_s: _Timeout = 2.0
    chunk_bytes: _Bytes = 16 << 20
    tls_cert_file: str = ""
    tls_key_file: str = ""
    tls_ca_file: str = ""
    token_file: str = ""
    nccl_budget_bytes: _Bytes = 512 << 20
    nccl_max_ctas: Annotated[int, Meta(ge=1, le=32)] = 4

    def __post_init__(self) -> None:
        if AUTO in self.transports and len(self.transports) > 1:
            refuse("transports", f"must be {AUTO!r} alone, or names without it")
        if self.tls_cert_file and not (self.tls_key_file and self.tls_ca_file):
            refuse("tls_cert_file", "needs tls_key_file and tls_ca_file")

    def names(self, *, on_gpu: bool) -> tuple[str, ...]:
        """Return the transports that a KV cache in GPU or host memory should use, best first."""
        if self.transports == (AUTO,):
            return ON_GPU if on_gpu else ON_HOST
        return self.transports

    @property
    def device_bytes(self) -> int:
        """GPU memory that the transports may hold beside the KV cache."""
        has_nccl = "nccl" in self.names(on_gpu=True)
        nccl = 2 * SLOTS * SLOT_BYTES + self.nccl_budget_bytes if has_nccl else 0
        # A copy or digest holds two chunks (device/region.py); mostly no more than two run at once.
        return 4 * self.chunk_bytes + nccl


class _Root(Struct, frozen=True):
    """Gives the keys their name in errors.

    kv: Settings of the KV plane.
    """

    kv: KvSettings


def from_extra_config(config: Mapping[str, Any]) -> KvSettings:
    """Raises ConfigError naming the key that is unknown or wrong."""
    return parse(_Root, {"kv": config}).kv
