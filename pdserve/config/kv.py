"""How KV blocks travel between workers, and where they are kept after the KV cache evicts them."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from pdserve.config.fields import (
    Amount,
    Bytes,
    Duration,
    Lease,
    Seconds,
    Section,
    Text,
    about,
    refuse,
)


class TiersConfig(Section, frozen=True):
    """Where a worker keeps prefixes that its KV cache evicts. Prefill workers load them
    from there."""

    host_gib: Annotated[Amount, about("Host memory of each worker, in GiB. 0: no tiers.")] = 0.0
    disk_path: Annotated[
        str,
        about("""Folder on a local disk. Workers of one host and one model share the prefixes in
        it, also after a restart. Empty: none."""),
    ] = ""
    disk_gib: Annotated[
        Amount,
        about("""Size of that folder in GiB. Beyond it, the blocks that were not used for longest
        are deleted."""),
    ] = 0.0

    def __post_init__(self) -> None:
        if bool(self.disk_path) != bool(self.disk_gib):
            missing = "disk_gib" if self.disk_path else "disk_path"
            refuse(missing, "disk_path and disk_gib must be set together")
        if self.disk_path and not self.host_gib:
            refuse("host_gib", "must be above 0: files are read through host memory")


class KvConfig(Section, frozen=True):
    """How KV blocks travel between workers."""

    host: Annotated[Text, about("Address at which other workers reach the KV of this one.")] = (
        "127.0.0.1"
    )
    transports: Annotated[
        tuple[Literal["auto", "shm", "tcp", "cuda_ipc", "nixl", "nccl"], ...],
        Meta(min_length=1),
        about("""Transports in order of preference. `auto` is shm, nixl and tcp for a KV cache in
        host memory, cuda_ipc, nixl and nccl for one on a GPU; nixl only on a machine with RDMA
        devices, and not with `access.require_auth`, because it does not authenticate."""),
    ] = ("auto",)
    shared_dir: Annotated[
        str,
        about("""Directory through which workers of one host share memory (shm). Containers must
        mount the same one. Empty: the directory for temporary files."""),
    ] = ""
    tls: Annotated[
        bool,
        about("""Encrypt KV, image features and all messages between workers, with the certificates
        of `access.tls`, which must be mutual. All workers of a model need the same value: others
        exchange no KV. NCCL and NIXL cannot encrypt, so `auto` leaves them out, and KV in GPU
        memory then moves only within a host. Memory that is shared on one host is not
        encrypted."""),
    ] = False
    hold_s: Annotated[
        Lease, about("Seconds for which a prefill worker keeps blocks for a silent decode worker.")
    ] = 30.0
    receive_timeout_s: Annotated[
        Duration, about("Seconds without progress after which a decode worker fails a transfer.")
    ] = 30.0
    handshake_timeout_s: Annotated[
        Duration,
        about("""Seconds that two workers may take from connecting to agreeing on a transport. It
        takes milliseconds, or longer while an engine compiles in its first step, because other
        threads then rarely run."""),
    ] = 15.0
    send_timeout_s: Annotated[
        Duration, about("Seconds that a peer may read nothing before its link is closed.")
    ] = 20.0
    preempt_timeout_s: Annotated[
        Duration,
        about("""Seconds that an engine step waits for copies of preempted blocks before their
        links are closed."""),
    ] = 2.0
    chunk_bytes: Annotated[
        Bytes,
        about("""Approximate size of the chunks in which blocks are sent and digested. Over NCCL,
        four of them are one send."""),
    ] = 16 << 20
    digest_one_in: Annotated[
        int,
        Meta(ge=1, le=1024),
        about("""Compute a digest for one in N blocks of a GPU cache. A digest detects damage in
        transit. 1: every block. Above 1, a transfer costs the host and the GPU less, and only the
        link's own checks cover the other blocks. Blocks in host memory always have digests."""),
    ] = 1
    nccl_budget_bytes: Annotated[
        Bytes,
        about("""GPU memory of all NCCL communicators of a worker: for each peer 2 MiB to send to
        it and 10 MiB to receive from it, times `nccl_max_ctas`. Links beyond it take turns."""),
    ] = 512 << 20
    nccl_max_ctas: Annotated[
        int,
        Meta(ge=1, le=32),
        about("""Thread blocks of each NCCL communicator. More are faster, and take more from the
        engine's kernels and from `nccl_budget_bytes`."""),
    ] = 4
    encode_timeout_s: Annotated[
        Duration,
        about("""Seconds that a prefill worker waits for the image features of a request from an
        encode worker. Then it computes them itself."""),
    ] = 10.0
    embeddings_bytes: Annotated[
        Bytes,
        about("""Host memory for image features in transit and until their use. Allocated when the
        first ones are sent."""),
    ] = 256 << 20
    tiers: TiersConfig = TiersConfig()

    def __post_init__(self) -> None:
        for name in ("nccl", "nixl"):
            if self.tls and name in self.transports:
                refuse("transports", f"must not have {name} with tls: it does not encrypt")
        if len(set(self.transports)) != len(self.transports):
            refuse("transports", f"has a duplicate: {', '.join(self.transports)}")
        if "auto" in self.transports and len(self.transports) > 1:
            refuse("transports", "`auto` must be the only entry")


class SessionRetentionConfig(Section, frozen=True):
    """How a worker keeps the KV of sessions between turns: it evicts other blocks first. No request
    waits for a block because of it."""

    share: Annotated[
        float,
        Meta(ge=0, le=1),
        about("Share of the KV cache that may be kept for sessions. 0: none."),
    ] = 0.5
    max_s: Annotated[
        Seconds,
        about("""Longest time in seconds that blocks are kept. It is shorter if the next turn is
        expected earlier."""),
    ] = 120.0
