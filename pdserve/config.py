"""The configuration: every key with its type, bounds, default and description.

One YAML file serves `pdserve up`, `pdserve router` and `pdserve worker`; each reads its own
section. `docs/configuration.md` and the output of `pdserve config` are generated from here.
"""

from __future__ import annotations

import ipaddress
import re
import textwrap
import typing
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, TypeVar

import msgspec
import yaml
from msgspec import Meta, Struct

from pdserve.errors import ConfigError
from pdserve.security.keys import is_hash
from pdserve.types import Role

DEMO_MODEL = "demo"
DEMO_MODEL_NAME = "pdserve-demo"

# Time that a drain may take after its streams have moved away: routers place them elsewhere, and
# blocks become free at the next engine step, or after a fence of their transport.
MOVE_S = 10.0
UNPIN_S = 30.0

_DAY_S = 86400


def doc(text: str) -> Meta:
    return Meta(description=text)


LogLevel = Annotated[
    Literal["debug", "info", "warning", "error"], doc("Lowest level that is logged.")
]
Text = Annotated[str, Meta(min_length=1)]
Port = Annotated[int, Meta(ge=0, le=65535)]
Count = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
Amount = Annotated[float, Meta(ge=0)]
Seconds = Annotated[float, Meta(ge=0, le=_DAY_S)]
Duration = Annotated[float, Meta(ge=0.001, le=_DAY_S)]
Lease = Annotated[float, Meta(ge=0.1, le=3600)]


class _Invalid(ConfigError, ValueError):
    """A ConfigError that msgspec reports with the path of the section that raised it."""


def _invalid(key: str, reason: str) -> NoReturn:
    raise _Invalid(f"{key}: {reason}", field=key)


def refuse(dotted: str, reason: str) -> NoReturn:
    """Raise ConfigError for a key or a command-line option."""
    raise ConfigError(f"{dotted}: {reason}" if dotted else reason, field=dotted)


class _Section(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all sections."""


def is_exposed(host: str) -> bool:
    """Return True if other machines can reach a server that listens at `host`."""
    try:
        return not ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host != "localhost"


def _require_auth(hosts: list[str], missing: list[str]) -> None:
    if missing:
        where, keys = ", ".join(dict.fromkeys(hosts)), "; ".join(dict.fromkeys(missing))
        _invalid("access.require_auth", f"other machines can reach {where}; set {keys}")


def _check_otlp(endpoint: str) -> None:
    if endpoint and not endpoint.startswith(("http://", "https://")):
        _invalid("otlp_endpoint", f"must begin with http:// or https://, not {endpoint!r}")


class TlsConfig(_Section, frozen=True):
    """TLS of gRPC and of sessions between routers and workers. Enabled by `cert_file`."""

    cert_file: Annotated[
        str, doc("PEM file: this process's certificate and its chain. Empty: no TLS.")
    ] = ""
    key_file: Annotated[str, doc("PEM file: the private key of `cert_file`, not encrypted.")] = ""
    ca_file: Annotated[
        str, doc("PEM file: CAs that sign the peers' certificates. Empty: public CAs.")
    ] = ""
    require_client_cert: Annotated[
        bool,
        doc(
            "With `ca_file`: accept only clients with a certificate that it signed. A URI in the "
            "certificate gives the role: `urn:pdserve:role:worker`, `...:router` or `...:admin`. "
            "Without one the caller is a client."
        ),
    ] = True
    peer_name: Annotated[
        str, doc("Name in the peers' certificates. Empty: the host that is dialled.")
    ] = ""

    def __post_init__(self) -> None:
        _check_tls_files(self)

    @property
    def is_mutual(self) -> bool:
        """True if every caller must present a certificate."""
        return bool(self.ca_file) and self.require_client_cert


class HttpTlsConfig(_Section, frozen=True):
    """TLS of HTTP. Enabled by `cert_file`."""

    cert_file: Annotated[
        str, doc("PEM file: the server's certificate and its chain. Empty: no TLS.")
    ] = ""
    key_file: Annotated[str, doc("PEM file: the private key of `cert_file`, not encrypted.")] = ""
    ca_file: Annotated[
        str, doc("PEM file: CAs. If set, clients must present a certificate of theirs.")
    ] = ""

    def __post_init__(self) -> None:
        _check_tls_files(self)


def _check_tls_files(tls: TlsConfig | HttpTlsConfig) -> None:
    if bool(tls.cert_file) != bool(tls.key_file):
        missing = "key_file" if tls.cert_file else "cert_file"
        _invalid(missing, "cert_file and key_file must be set together")
    if tls.ca_file and not tls.cert_file:
        _invalid("cert_file", "is required because ca_file is set")


class AccessConfig(_Section, frozen=True):
    """Who may connect to a process, and with which role."""

    require_auth: Annotated[
        bool,
        doc(
            "Refuse to start if an address that other machines can reach accepts unauthenticated "
            "callers."
        ),
    ] = False
    tls: Annotated[TlsConfig, doc("TLS of gRPC and of sessions.")] = TlsConfig()
    worker_token_file: Annotated[
        str,
        doc(
            "File with a secret that workers and routers share. Use it where certificates do not "
            "give roles."
        ),
    ] = ""
    admin_keys: Annotated[
        tuple[str, ...], doc("Hashes (`pdserve config hash-key`) of the keys of administrators.")
    ] = ()

    def __post_init__(self) -> None:
        _check_hashes("admin_keys", self.admin_keys)
        if self.admin_keys and not (self.tls.is_mutual or self.worker_token_file):
            _invalid(
                "admin_keys",
                "needs worker_token_file, or tls.ca_file with client certificates: workers must "
                "authenticate too once roles are checked",
            )

    @property
    def asks_for_roles(self) -> bool:
        """True if callers must authenticate for anything but public requests."""
        return self.tls.is_mutual or bool(self.worker_token_file) or bool(self.admin_keys)


class RouterAccessConfig(AccessConfig, frozen=True):
    """Access to a router, which serves HTTP too."""

    http_tls: Annotated[HttpTlsConfig, doc("TLS of HTTP.")] = HttpTlsConfig()


def _check_hashes(key: str, hashes: tuple[str, ...]) -> None:
    for i, text in enumerate(hashes):
        if not is_hash(text):
            # The value may be a key put here by mistake, so it is not repeated.
            _invalid(f"{key}[{i}]", "must be a hash that `pdserve config hash-key` printed")


class TenantConfig(_Section, frozen=True):
    """A tenant: its API keys and its limits."""

    name: Annotated[str, doc("Name of the tenant in metrics.")] = ""
    keys: Annotated[
        tuple[str, ...], doc("Hashes of its API keys (`pdserve config hash-key`).")
    ] = ()
    weight: Annotated[
        float, Meta(ge=0.001, le=1e6), doc("Its share of the service while requests are queued.")
    ] = 1.0
    requests_per_minute: Annotated[Amount, doc("Requests a minute. 0: no limit.")] = 0.0
    tokens_per_minute: Annotated[
        Amount, doc("Tokens a minute, prompts and expected answers. 0: no limit.")
    ] = 0.0
    max_concurrent_requests: Annotated[
        Count, doc("Requests queued and running at a time. 0: no limit.")
    ] = 0

    def __post_init__(self) -> None:
        if not self.name:
            _invalid("name", "must not be empty")
        _check_hashes("keys", self.keys)


class SloConfig(_Section, frozen=True):
    """Latency targets. Admission and the policy `slo_aware` use them."""

    ttft_s: Annotated[float, Meta(ge=0.001, le=3600), doc("Seconds to the first token (TTFT).")] = (
        1.0
    )
    tpot_s: Annotated[float, Meta(ge=0.0001, le=3600), doc("Seconds a token after it (TPOT).")] = (
        0.1
    )
    reject_factor: Annotated[
        float,
        Meta(ge=0, le=1000),
        doc(
            "Reject an interactive request if its predicted TTFT exceeds `reject_factor × ttft_s`. "
            "Queue it if its predicted TPOT exceeds `reject_factor × tpot_s`. 0 disables both."
        ),
    ] = 0.0


class RolesConfig(_Section, frozen=True):
    """When the router moves workers between prefill and decode."""

    auto: Annotated[
        bool,
        doc(
            "Change roles by load. Otherwise only `pdserve role` does. Enable it on one router "
            "only."
        ),
    ] = False
    window_s: Annotated[
        Duration,
        doc("Loads are averaged over this time. Another split must be better for as long."),
    ] = 30.0
    cooldown_s: Annotated[
        Seconds, doc("Pause after a role change, and after workers came or left.")
    ] = 60.0
    min_load: Annotated[
        float, Meta(ge=0, le=100), doc("Change nothing while both phases are loaded less.")
    ] = 0.7


class HealthConfig(_Section, frozen=True):
    """When a worker that is alive gets no work."""

    stall_s: Annotated[
        float,
        Meta(ge=0, le=3600),
        doc(
            "Seconds without a step after which a busy worker's requests continue elsewhere; more "
            "while a step is expected to take longer. 0: never."
        ),
    ] = 2.0
    eject_s: Annotated[
        Seconds,
        doc(
            "Eject a worker for this time after three failures in a row, and longer while probes "
            "fail. 0: never."
        ),
    ] = 10.0
    eject_pair_s: Annotated[
        Seconds,
        doc(
            "Eject a pair of workers for this time after KV was damaged between them, and longer "
            "while probes fail. 0: never."
        ),
    ] = 60.0
    probe_s: Annotated[
        Seconds,
        doc(
            "Probe a pair of workers after this time without a transfer between them. 0: probe "
            "only what was ejected."
        ),
    ] = 60.0


class RetryConfig(_Section, frozen=True):
    """The retry policy: what is computed again when a worker fails."""

    max_retries: Annotated[int, Meta(ge=0, le=1000), doc("Retries of one request.")] = 16
    tokens_per_s: Annotated[
        Amount,
        doc(
            "Retry budget of a model: prompt and output tokens computed again a second, on "
            "average. Requests beyond it fail with 503. 0: no limit."
        ),
    ] = 20000.0
    burst_s: Annotated[Duration, doc("Seconds of the budget usable at once.")] = 30.0


class RouterConfig(_Section, frozen=True):
    """The router: its listeners, admission and placement."""

    http_host: Annotated[Text, doc("Address of the HTTP listener.")] = "127.0.0.1"
    http_port: Annotated[Port, doc("Port of the HTTP listener; 0 takes a free one.")] = 8000
    shared_http_port: Annotated[
        Port,
        doc(
            "A port that several routers of one machine share: each connection goes to one of "
            "them. 0: none."
        ),
    ] = 0
    grpc_host: Annotated[Text, doc("Address of the gRPC listener, for clients and workers.")] = (
        "127.0.0.1"
    )
    grpc_port: Annotated[Port, doc("Port of the gRPC listener; 0 takes a free one.")] = 8001
    policy: Annotated[
        Literal[
            "always_aggregated",
            "least_loaded",
            "power_of_two",
            "prefix_aware",
            "round_robin",
            "slo_aware",
        ],
        doc("How workers are chosen for a request."),
    ] = "slo_aware"
    prefix_max_blocks: Annotated[
        Count, doc("Capacity of the prefix index in KV blocks, about 100 bytes each. 0: none.")
    ] = 2_000_000
    decision_log_size: Annotated[
        Count, doc("Requests whose placement `pdserve explain` shows.")
    ] = 1024
    max_running_requests: Annotated[Positive, doc("Requests running on workers at a time.")] = 256
    max_queued_requests: Annotated[
        Count, doc("Requests that may wait. More are rejected with 429.")
    ] = 1024
    queue_timeout_s: Annotated[
        Seconds, doc("How long a request waits while no worker of a role is ready. Then 503.")
    ] = 30.0
    tenants: Annotated[
        tuple[TenantConfig, ...], doc("Tenants by API key. Without any, every caller is served.")
    ] = ()
    request_timeout_s: Annotated[Duration, doc("Deadline of a request that gives none.")] = 600.0
    lease_s: Annotated[Lease, doc("Lease of a worker. One that does not renew it is lost.")] = 5.0
    max_body_bytes: Annotated[
        int, Meta(ge=1024), doc("Largest HTTP body or gRPC message of a client.")
    ] = 8 * 1024 * 1024
    access: Annotated[
        RouterAccessConfig, doc("Who may connect. API keys of clients are under `tenants`.")
    ] = RouterAccessConfig()
    roles: Annotated[RolesConfig, doc("The autoscaler of roles.")] = RolesConfig()
    health: Annotated[HealthConfig, doc("When a worker that is alive gets no work.")] = (
        HealthConfig()
    )
    retry: Annotated[RetryConfig, doc("The retry policy.")] = RetryConfig()
    otlp_endpoint: Annotated[
        str, doc("OTLP/gRPC endpoint for spans, `http://host:4317`. Empty: no traces.")
    ] = ""
    stop_grace_s: Annotated[Amount, doc("Seconds that open requests have after SIGTERM.")] = 10.0
    slo: Annotated[SloConfig, doc("Latency targets.")] = SloConfig()
    log_level: LogLevel = "info"

    def __post_init__(self) -> None:
        names = [tenant.name for tenant in self.tenants]
        hashes = [text for tenant in self.tenants for text in tenant.keys]
        if len(set(names)) != len(names):
            _invalid("tenants", "two tenants have the same name")
        if len(set(hashes)) != len(hashes):
            _invalid("tenants", "two tenants have the same key")
        if self.shared_http_port and self.shared_http_port in (self.http_port, self.grpc_port):
            _invalid("shared_http_port", "must differ from http_port and grpc_port")
        _check_otlp(self.otlp_endpoint)
        if self.access.require_auth:
            self._check_authentication()

    def _check_authentication(self) -> None:
        access, tls, missing = self.access, self.access.tls, list[str]()
        hosts = [host for host in (self.http_host, self.grpc_host) if is_exposed(host)]
        if is_exposed(self.http_host):
            if not (self.tenants or access.http_tls.ca_file):
                missing.append("tenants (API keys)")
            if not access.http_tls.cert_file:
                missing.append("access.http_tls.cert_file")
        if is_exposed(self.grpc_host):
            if not (self.tenants or tls.is_mutual):
                missing.append("tenants (API keys)")
            if not tls.cert_file:
                missing.append("access.tls.cert_file")
            if not (tls.is_mutual or access.worker_token_file):
                missing.append("access.tls.ca_file or access.worker_token_file (workers)")
            if not (tls.is_mutual or access.admin_keys):
                missing.append("access.tls.ca_file or access.admin_keys (administrators)")
        _require_auth(hosts, missing)


class KvConfig(_Section, frozen=True):
    """How KV blocks travel between workers."""

    connector: Annotated[
        Literal["pdserve", "nixl"],
        doc(
            "`pdserve`, or vLLM's NixlConnector, which needs the package `nixl`, uses only `host` "
            "and `lease_s`, and does not authenticate."
        ),
    ] = "pdserve"
    host: Annotated[Text, doc("Address at which other workers reach this one's KV.")] = "127.0.0.1"
    transports: Annotated[
        tuple[Literal["auto", "shm", "tcp", "cuda_ipc", "nccl"], ...],
        Meta(min_length=1),
        doc(
            "Transports, the preferred one first. `auto` takes shm and tcp for a KV cache in host "
            "memory, cuda_ipc and nccl for one on a GPU."
        ),
    ] = ("auto",)
    lease_s: Annotated[
        Lease, doc("Seconds for which a prefill worker keeps blocks for a silent decode worker.")
    ] = 30.0

    def __post_init__(self) -> None:
        if len(set(self.transports)) != len(self.transports):
            _invalid("transports", f"has a duplicate: {', '.join(self.transports)}")
        if "auto" in self.transports and len(self.transports) > 1:
            _invalid("transports", "`auto` must be the only entry")


class WorkerConfig(_Section, frozen=True):
    """One worker: an engine in one role."""

    worker_id: Annotated[str, doc("Name of the worker. Empty: made from role and process id.")] = ""
    role: Annotated[Role, doc("Which phases the worker runs.")] = Role.AGGREGATED
    engine: Annotated[
        Literal["vllm", "fake"], doc("vLLM, or a fake engine that needs no model weights.")
    ] = "vllm"
    model: Annotated[Text, doc("Directory of the model, or `demo` for the one shipped.")] = (
        DEMO_MODEL
    )
    model_name: Annotated[
        str, doc("Name under which the model is served. Empty: the directory's name.")
    ] = ""
    host: Annotated[Text, doc("Address at which routers reach the worker.")] = "127.0.0.1"
    port: Annotated[Port, doc("Port of the worker; 0 takes a free one.")] = 0
    debug_host: Annotated[
        str, doc("Address of the HTTP listener for metrics and debugging. Empty: none.")
    ] = "127.0.0.1"
    debug_port: Annotated[Port, doc("Port of that listener; 0 takes a free one.")] = 0
    routers: Annotated[
        tuple[str, ...],
        Meta(min_length=1),
        doc("gRPC addresses (host:port) of the routers to register with."),
    ] = ("127.0.0.1:8001",)
    cores: Annotated[
        tuple[Count, ...], doc("CPU cores to pin the engine to. Empty: not pinned.")
    ] = ()
    gpus: Annotated[
        tuple[Count, ...],
        doc("GPUs that the engine may use, by NVML index. Empty: all visible ones."),
    ] = ()
    kv: Annotated[KvConfig, doc("How KV blocks travel between workers.")] = KvConfig()
    access: Annotated[AccessConfig, doc("Who may connect.")] = AccessConfig()
    engine_args: Annotated[
        dict[str, object], doc("Engine arguments of vLLM, under vLLM's names.")
    ] = {}
    otlp_endpoint: Annotated[
        str, doc("OTLP/gRPC endpoint for spans, `http://host:4317`. Empty: no traces.")
    ] = ""
    drain_timeout_s: Annotated[
        Amount, doc("Seconds after which the streams of a stopping worker are moved.")
    ] = 30.0
    log_level: LogLevel = "info"

    def __post_init__(self) -> None:
        _check_otlp(self.otlp_endpoint)
        for address in self.routers:
            host, _, port = address.rpartition(":")
            if not host or not port.isdecimal() or not 0 < int(port) <= 65535:
                _invalid("routers", f"must be host:port addresses, not {address!r}")
        if len(set(self.cores)) != len(self.cores):
            _invalid("cores", "has a duplicate")
        if self.access.require_auth:
            self._check_authentication()

    def _check_authentication(self) -> None:
        tls, missing = self.access.tls, list[str]()
        hosts = [host for host in (self.host, self.debug_host) if host and is_exposed(host)]
        remote = [host for x in self.routers if is_exposed(host := x.rpartition(":")[0])]
        if is_exposed(self.host) or remote:
            if not tls.cert_file:
                missing.append("access.tls.cert_file")
            if not (tls.is_mutual or self.access.worker_token_file):
                missing.append("access.tls.ca_file or access.worker_token_file")
        if self.debug_host and is_exposed(self.debug_host):
            missing.append("debug_host to a loopback address or empty (it has no authentication)")
        if self.kv.connector == "nixl" and is_exposed(self.kv.host):
            hosts.append(self.kv.host)
            missing.append("kv.connector to pdserve (nixl has no authentication)")
        _require_auth([*hosts, *remote], missing)

    @property
    def model_path(self) -> Path:
        """The model's directory. Raises ConfigError if it holds no model."""
        if self.model == DEMO_MODEL:
            from pdserve.demo import MODEL_DIR

            path = MODEL_DIR
        else:
            path = Path(self.model).expanduser().resolve()
        if not (path / "config.json").is_file():
            refuse("model", f"{path} is not a model directory: it has no config.json")
        return path

    @property
    def served_model_name(self) -> str:
        if self.model_name:
            return self.model_name
        return DEMO_MODEL_NAME if self.model == DEMO_MODEL else Path(self.model).name


class UpConfig(_Section, frozen=True):
    """What `pdserve up` starts."""

    prefill: Annotated[int, Meta(ge=0, le=1024), doc("Prefill workers.")] = 1
    decode: Annotated[int, Meta(ge=0, le=1024), doc("Decode workers.")] = 1
    aggregated: Annotated[int, Meta(ge=0, le=1024), doc("Workers that run both phases.")] = 0
    routers: Annotated[
        int,
        Meta(ge=1, le=16),
        doc("Routers. The first has the ports of `router`, each further one ports 10 higher."),
    ] = 1
    cores_per_worker: Annotated[Count, doc("CPU cores of each worker. 0: an equal share.")] = 0
    gpus_per_worker: Annotated[
        Count, doc("GPUs of each worker. 0: its tensor_parallel_size, shared if there are too few.")
    ] = 0
    start_timeout_s: Annotated[
        float, Meta(ge=1, le=_DAY_S), doc("Seconds until all processes must be ready.")
    ] = 300.0
    max_restarts: Annotated[Count, doc("Restarts of a process that dies before `up` gives up.")] = 5
    ready_file: Annotated[
        str, doc("JSON file written once all are ready: addresses, process ids and roles.")
    ] = ""
    run_dir: Annotated[str, doc("Directory for logs. Empty: a temporary one.")] = ""

    def __post_init__(self) -> None:
        if bool(self.prefill) != bool(self.decode):
            missing = "decode" if self.prefill else "prefill"
            _invalid(missing, "must be at least 1: prefill and decode workers need each other")
        if not self.prefill + self.decode + self.aggregated:
            _invalid("prefill", "at least one worker is required")


class Config(_Section, frozen=True):
    """The whole file."""

    up: Annotated[UpConfig, doc("What `pdserve up` starts.")] = UpConfig()
    router: Annotated[RouterConfig, doc("The router: its listeners, admission and placement.")] = (
        RouterConfig()
    )
    worker: Annotated[
        WorkerConfig,
        doc(
            "A worker. `pdserve up` copies this section for each worker and sets `worker_id`, "
            "`role`, `port`, `debug_port`, `routers`, `cores` and `gpus`."
        ),
    ] = WorkerConfig()


# Reading

_T = TypeVar("_T")


def load_config(path: Path | None, changes: Mapping[str, object]) -> Config:
    """Return the file at `path`, or the defaults, with `changes` (by dotted key) applied. Raises
    ConfigError."""
    raw = read_file(path) if path is not None else {}
    return parse(Config, overlay(raw, changes))


class _StrictLoader(yaml.SafeLoader):
    """Refuses a key written twice. Plain YAML silently keeps the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[object] = set()
        for key_node, _ in node.value:
            name = self.construct_object(key_node, deep=True)
            if not isinstance(name, Hashable):
                continue  # the base class refuses it
            if name in seen:
                line = key_node.start_mark.line + 1
                raise ConfigError(f"{name}: is written twice (line {line})", field=str(name))
            seen.add(name)
        return typing.cast("dict[Any, Any]", super().construct_mapping(node, deep))


def read_yaml(text: str, source: str) -> dict[str, object]:
    """Return the mapping in `text`. Raises ConfigError."""
    try:
        loaded = yaml.load(text, _StrictLoader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{source} is not YAML: {error}") from error
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise ConfigError(f"{source} must hold a mapping of keys, not {type(loaded).__name__}")
    return loaded


def read_file(path: Path) -> dict[str, object]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error}") from error
    return read_yaml(text, str(path))


def overlay(raw: Mapping[str, object], changes: Mapping[str, object]) -> dict[str, object]:
    """Return a copy of `raw` with each dotted key of `changes` set."""
    result = dict(raw)
    for dotted, value in changes.items():
        head, _, rest = dotted.partition(".")
        if not rest:
            result[head] = value
            continue
        inner = result.get(head, {})
        if not isinstance(inner, Mapping):
            refuse(head, f"must be a mapping, not {inner!r}")
        result[head] = overlay(inner, {rest: value})
    return result


def to_mapping(section: Struct) -> dict[str, object]:
    """Return the section as plain values, which `parse` reads back."""
    built = msgspec.to_builtins(section, builtin_types=(tuple,))
    plain: dict[str, object] = msgspec.json.decode(msgspec.json.encode(built))
    return plain


def parse(cls: type[_T], raw: object, at: str = "") -> _T:
    """Return `raw` as the section `cls`. Raises ConfigError with the dotted key, under `at`."""
    try:
        return msgspec.convert(raw, cls)
    except msgspec.ValidationError as error:
        text, _, path = str(error).partition(" - at ")
        dotted = ".".join(x for x in (at, path.rpartition("$")[2].strip("`.")) if x)
        cause = error.__cause__
        if isinstance(cause, ConfigError):
            reason = cause.message.removeprefix(f"{cause.field}: ")
            refuse(".".join(x for x in (dotted, cause.field) if x), reason)
        _explain(cls, text, dotted, at)


_NAMES = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "a boolean",
    "array": "a list",
    "object": "a mapping",
    "null": "empty",
}


def _explain(cls: type[object], text: str, dotted: str, at: str) -> NoReturn:
    """Raise msgspec's message `text` in the words of a configuration file."""
    inside = re.sub(r"\[[^]]*\]", "[]", dotted.removeprefix(at).lstrip("."))
    if unknown := re.match(r"Object contains unknown field `(.*)`", text):
        known = _struct_at(cls, inside)
        refuse(f"{dotted}.{unknown[1]}".lstrip("."), f"unknown key; keys are {', '.join(known)}")
    if text.startswith("Invalid enum value"):
        names = {key.dotted: key for key in all_keys(cls)}
        choices = names[inside.removesuffix("[]")].choices
        refuse(dotted, f"must be one of {', '.join(choices)}, not {text.split()[-1]}")
    text = re.sub(r"`(?:array|str)` of length >= 1", "not empty", text)
    text = re.sub(r"`(\w+)`", lambda match: _NAMES.get(match[1], match[1]), text)
    refuse(dotted, text.replace("Expected", "must be").replace(", got", ", not"))


def _struct_at(cls: type[object], dotted: str) -> tuple[str, ...]:
    hint: Any = cls
    for name in dotted.split(".") if dotted else ():
        hint = _bare(typing.get_type_hints(hint)[name.removesuffix("[]")])
        hint = _bare(typing.get_args(hint)[0]) if name.endswith("[]") else hint
    return tuple(getattr(hint, "__struct_fields__", ()))


# Documentation


@dataclass(frozen=True, slots=True)
class Key:
    """One key as documentation shows it. `default` is as YAML loads it."""

    dotted: str
    type_name: str
    default: object
    description: str
    choices: tuple[str, ...]

    @property
    def sentence(self) -> str:
        more = f" One of: {', '.join(self.choices)}." if self.choices else ""
        return self.description + more


def _bare(hint: Any) -> Any:
    return _bare(hint.__origin__) if typing.get_origin(hint) is Annotated else hint


def _fields(cls: Any) -> Iterator[tuple[str, Any, str, object]]:
    """Yield name, type, description and default of each field."""
    hints = typing.get_type_hints(cls, include_extras=True)
    for spec in msgspec.structs.fields(cls):
        hint = hints[spec.name]
        texts = [x.description for x in getattr(hint, "__metadata__", ()) if x.description]
        default = spec.default
        if default is msgspec.NODEFAULT:
            default = spec.default_factory() if callable(spec.default_factory) else ""
        yield spec.name, _bare(hint), texts[-1] if texts else "", default


def _is_section(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, Struct)


def _items(hint: Any) -> Any:
    return _bare(typing.get_args(hint)[0])


def all_keys(cls: type[object] = Config, at: str = "") -> Iterator[Key]:
    """Yield every key below `cls`; those of list items as `name[].key`."""
    for name, hint, description, default in _fields(cls):
        dotted = f"{at}{name}"
        if _is_section(hint):
            yield from all_keys(hint, f"{dotted}.")
            continue
        is_list = typing.get_origin(hint) is tuple
        item = _items(hint) if is_list else hint
        choices = typing.get_args(item) if typing.get_origin(item) is Literal else ()
        if isinstance(item, type) and issubclass(item, Enum):
            choices = tuple(member.value for member in item)
        plain = msgspec.to_builtins(default)
        kind = _type_name(item)
        yield Key(
            dotted,
            f"list of {kind}" if is_list else kind,
            list(plain) if is_list else plain,
            description,
            choices,
        )
        if is_list and _is_section(item):
            yield from all_keys(item, f"{dotted}[].")


def _type_name(hint: Any) -> str:
    if typing.get_origin(hint) is dict or _is_section(hint):
        return "mapping"
    return {int: "integer", float: "number", bool: "boolean"}.get(hint, "string")


def as_yaml(config: Config | None = None) -> str:
    """Return a configuration file with every key under its description."""
    return "\n".join(_yaml_section(Config, to_mapping(config or Config()), "")) + "\n"


def _yaml_section(cls: Any, values: Any, indent: str) -> Iterator[str]:
    sections = []
    choices = {key.dotted: key.sentence for key in all_keys(cls)}
    for name, hint, description, _ in _fields(cls):
        if _is_section(hint):
            sections.append((name, hint, description))
            continue
        yield from _comment(choices[name], indent)
        yield f"{indent}{name}: {_flow(values[name])}"
    for name, hint, description in sections:
        if not indent and name != sections[0][0]:
            yield ""
        yield from _comment(description, indent)
        yield f"{indent}{name}:"
        yield from _yaml_section(hint, values[name], indent + "  ")


def _comment(text: str, indent: str) -> list[str]:
    prefix = f"{indent}# "
    return textwrap.wrap(text, 100, initial_indent=prefix, subsequent_indent=prefix)


def _flow(value: object) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=1000)
    return text.removesuffix("...\n").strip()


_INTRO = """\
# Configuration

One YAML file (`--config FILE`) serves `pdserve up`, `pdserve router` and `pdserve worker`; each
reads its own section. `--set KEY=VALUE` sets any key on the command line and overrides the file.
The options in `--help` do the same for the most common keys. Unknown keys, wrong types and values
out of bounds are refused with the name of the key. `pdserve config` prints a file with every key.
"""


def as_markdown() -> str:
    """Return the text of docs/configuration.md."""
    parts = [_INTRO]
    for name, hint, description, _ in _fields(Config):
        parts += [f"## `{name}`\n", f"{description}\n", "| key | type | default | meaning |"]
        parts.append("|---|---|---|---|")
        for key in all_keys(hint, f"{name}."):
            if key.dotted.startswith("worker.access."):
                continue
            cells = (f"`{key.dotted}`", key.type_name, f"`{_flow(key.default)}`", key.sentence)
            parts.append(f"| {' | '.join(cells)} |")
        if name == "worker":
            parts.append("| `worker.access.*` | | | As `router.access.*`, without `http_tls`. |")
        parts.append("")
    return "\n".join(parts)


if __name__ == "__main__":
    path = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"
    path.write_text(as_markdown(), encoding="utf-8")
