"""Settings of the KV plane, as they come through vLLM's `kv_connector_extra_config`."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

_TIMES = (
    "lease_s",
    "receive_timeout_s",
    "handshake_timeout_s",
    "send_timeout_s",
    "preempt_timeout_s",
)
# Field: least and most.
_SIZES = {
    "chunk_bytes": (1, 1 << 40),
    "nccl_budget_bytes": (1, 1 << 40),
    "nccl_max_ctas": (1, 32),
}
# In the place of transports: those that suit where the KV cache is.
AUTO = "auto"
# Those that move a cache in GPU memory, and those that move one in host memory, best first.
ON_GPU = ("cuda_ipc", "nccl")
# NCCL: staging slots in each direction, beside the KV cache. A slot holds at least one block.
SLOTS, SLOT_BYTES = 4, 32 << 20
ON_HOST = ("shm", "tcp")
# Those that work only between processes of one host.
LOCAL = ("shm", "cuda_ipc")


@dataclass(frozen=True, slots=True)
class KvSettings:
    """Times in seconds, sizes in bytes. Raises ConfigError naming the key."""

    host: str = "127.0.0.1"
    # In order of preference; AUTO alone, or names.
    transports: tuple[str, ...] = (AUTO,)
    # Directory through which workers of this host pass their memory to one another. Containers must
    # mount the same one. Empty: the one for temporary files.
    shared_dir: str = ""
    # How long a producer holds blocks for a consumer that does not fetch them.
    lease_s: float = 30.0
    # How long a consumer waits without progress before it fails a transfer.
    receive_timeout_s: float = 30.0
    # How long two workers may take from connecting to agreeing on a transport: milliseconds, but
    # a peer whose engine compiles in its first step lets its other threads run seldom.
    handshake_timeout_s: float = 15.0
    # How long a peer may read nothing before its link is closed.
    send_timeout_s: float = 20.0
    # How long a step waits for copies of preempted blocks before their links are closed.
    preempt_timeout_s: float = 2.0
    # Blocks are sent, and digested, in chunks of about this size.
    chunk_bytes: int = 16 << 20
    # Credentials of links, as in `access` (protocol/auth.py): TLS files and the worker token.
    tls_cert_file: str = ""
    tls_key_file: str = ""
    tls_ca_file: str = ""
    token_file: str = ""
    # NCCL: GPU memory of all communicators, and thread blocks of each.
    nccl_budget_bytes: int = 512 << 20
    nccl_max_ctas: int = 4

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

    def __post_init__(self) -> None:
        for name in _TIMES:
            value = getattr(self, name)
            if type(value) not in (int, float) or not 0 < value < math.inf:
                raise _refuse(name, "must be a time above 0")
        for name, (least, most) in _SIZES.items():
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= most:
                raise _refuse(name, f"must be a whole number from {least} to {most}")
        if not isinstance(self.host, str) or not self.host:
            raise _refuse("host", "must name an address")
        if not isinstance(self.transports, tuple) or not self.transports:
            raise _refuse("transports", "must be a list that names a transport")
        if not all(isinstance(name, str) for name in self.transports):
            raise _refuse("transports", "must be a list of names")
        if AUTO in self.transports and len(self.transports) > 1:
            raise _refuse("transports", f"must be {AUTO!r} alone, or names without it")
        for name in ("tls_cert_file", "tls_key_file", "tls_ca_file", "token_file", "shared_dir"):
            if not isinstance(getattr(self, name), str):
                raise _refuse(name, "must be a path")
        if self.tls_cert_file and not (self.tls_key_file and self.tls_ca_file):
            raise _refuse("tls_cert_file", "needs tls_key_file and tls_ca_file")


def _refuse(name: str, problem: str) -> ConfigError:
    return ConfigError(f"kv.{name} {problem}", field=f"kv.{name}")


def from_extra_config(config: Mapping[str, Any]) -> KvSettings:
    """Raises ConfigError naming the key that is unknown or wrong."""
    known = {f.name for f in fields(KvSettings)}
    for key in config:
        if key not in known:
            raise _refuse(key, "is no setting of the KV plane")
    values = dict(config)
    if isinstance(values.get("transports"), list):
        values["transports"] = tuple(values["transports"])
    return KvSettings(**values)
