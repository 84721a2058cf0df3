"""Every configuration key, with its default and its sentence. docs/configuration.md and
`pdserve config` are generated from here.

One file serves `pdserve up`, `pdserve router` and `pdserve worker`: each reads its own section.
"""

from __future__ import annotations

from collections.abc import Mapping  # noqa: TC003 - the schema reads annotations at run time
from dataclasses import dataclass
from pathlib import Path

from pdserve.access.config import AccessConfig, RouterAccessConfig
from pdserve.access.strict import check_router, check_worker
from pdserve.config_schema import check, key, parse, read_file, refuse, section
from pdserve.config_schema import overlay as overlay_keys
from pdserve.failure_config import DetectionConfig, FallbackConfig, GpuConfig
from pdserve.role_config import RolesConfig
from pdserve.tenant_config import TenantConfig  # noqa: TC001 - read at run time
from pdserve.types import Role

LOG_LEVELS = ("debug", "info", "warning", "error")
POLICIES = (
    *("always_local", "least_loaded", "power_of_two", "prefix_aware", "round_robin"),
    "slo_aware",
)
DEMO_MODEL = "demo"
DEMO_MODEL_NAME = "pdserve-demo"


@dataclass(frozen=True, slots=True)
class SloConfig:
    """What clients were promised. Admission acts on it, and of the policies `slo_aware`."""

    ttft_s: float = key(
        1.0, "Seconds from a request's arrival to its first token.", minimum=0.001, maximum=3600
    )
    tpot_s: float = key(0.1, "Seconds between two tokens.", minimum=0.0001, maximum=3600)
    refuse_beyond: float = key(
        5.0,
        "Interactive requests are refused once their first token is predicted later than so many "
        "times `ttft_s`, and whoever would make gaps longer than so many times `tpot_s` waits; 0 "
        "does neither.",
        minimum=0,
        maximum=1000,
    )

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """The router: its two faces and what it admits."""

    http_host: str = key("127.0.0.1", "Address of the HTTP face.", not_empty=True)
    http_port: int = key(
        8000, "Port of the HTTP face; 0 takes a free one.", minimum=0, maximum=65535
    )
    shared_http_port: int = key(
        0,
        "Port at which every router of this machine that names it serves HTTP too: a connection "
        "is given to one of them. 0 for none.",
        minimum=0,
        maximum=65535,
    )
    grpc_host: str = key(
        "127.0.0.1", "Address of the gRPC face, which workers use too.", not_empty=True
    )
    grpc_port: int = key(
        8001, "Port of the gRPC face; 0 takes a free one.", minimum=0, maximum=65535
    )
    policy: str = key("slo_aware", "How requests are placed on workers.", choices=POLICIES)
    prefix_max_blocks: int = key(
        2_000_000,
        "Most KV blocks in the index of the workers' prefix caches, about 100 bytes each. 0: no "
        "index.",
        minimum=0,
    )
    decision_log_size: int = key(
        1024, "Placement decisions kept for `pdserve explain`; 0 keeps none.", minimum=0
    )
    max_running_requests: int = key(256, "Requests placed on workers at one time.", minimum=1)
    max_queued_requests: int = key(
        1024, "Requests that may wait; one more is refused with 429.", minimum=0
    )
    batch_share: float = key(
        0.75,
        "Most of the running requests that may be of the batch class.",
        minimum=0.0,
        maximum=1.0,
    )
    prefill_chunks_ahead: int = key(
        2,
        "Chunks of prompts that a worker is given ahead, or one longer prompt; the others wait in "
        "the router's order. 0 gives it all at once.",
        minimum=0,
    )
    tenants: tuple[TenantConfig, ...] = key(
        (), "Whom the router serves, by API key; without any, everyone."
    )
    request_timeout_s: float = key(
        600.0, "Deadline of a request that names none.", minimum=0.001, maximum=86400
    )
    lease_s: float = key(
        5.0,
        "How long a worker that has stopped renewing is still believed to live.",
        minimum=0.1,
        maximum=3600,
    )
    quarantine_s: float = key(
        60.0,
        "How long a prefill and a decode worker are kept apart when KV between them came damaged "
        "twice; 0 never does.",
        minimum=0,
        maximum=86400,
    )
    max_body_bytes: int = key(
        8 * 1024 * 1024, "Largest HTTP body or gRPC message taken from a client.", minimum=1024
    )
    access: RouterAccessConfig = section(
        RouterAccessConfig, "Who may connect, and as what; API keys are those of `tenants`."
    )
    roles: RolesConfig = section(RolesConfig, "When workers are moved between prefill and decode.")
    max_connections: int = key(
        16_384,
        "HTTP connections at one time, fewer where the limit of open files does not allow them; "
        "one more gets 503.",
        minimum=1,
    )
    detection: DetectionConfig = section(
        DetectionConfig, "When a worker that lives is given no work."
    )
    otlp_endpoint: str = key(
        "", "Where spans go by OTLP over gRPC, as `http://host:4317`; empty makes none."
    )
    trace_share: float = key(
        1.0, "Share of the requests without a `traceparent` that is traced.", minimum=0, maximum=1
    )
    fallback: FallbackConfig = section(
        FallbackConfig, "What is computed again when a worker fails, and when to give up."
    )
    stop_grace_s: float = key(
        10.0, "How long running requests may go on after a stop was asked for.", minimum=0
    )
    slo: SloConfig = section(
        SloConfig,
        "What clients were promised: it decides who is taken, `slo_aware` places by it, "
        "`pdserve status` judges.",
    )
    log_level: str = key("info", "Least level that is logged.", choices=LOG_LEVELS)

    def __post_init__(self) -> None:
        check(self)
        names = [tenant.name for tenant in self.tenants]
        hashes = [text for tenant in self.tenants for text in tenant.keys]
        if len(set(names)) != len(names):
            refuse("tenants", "names one twice")
        if len(set(hashes)) != len(hashes):
            refuse("tenants", "has one key twice")
        if self.shared_http_port and self.shared_http_port in (self.http_port, self.grpc_port):
            refuse("shared_http_port", "must be another than http_port and grpc_port")
        _check_otlp(self.otlp_endpoint)
        check_router(self)


@dataclass(frozen=True, slots=True)
class KvConfig:
    """How KV blocks travel between workers."""

    connector: str = key(
        "pdserve",
        "What moves KV: pdserve's own connector, or vLLM's NixlConnector, which needs the package "
        "`nixl`, takes of these keys `host` and `lease_s` alone, and asks for no rights.",
        choices=("pdserve", "nixl"),
    )
    host: str = key(
        "127.0.0.1", "Address at which the other workers reach this one's KV.", not_empty=True
    )
    transports: tuple[str, ...] = key(
        ("auto",),
        "Transports offered, the preferred one first; `auto` alone takes shm and tcp for a KV "
        "cache in host memory, nccl for one on a GPU, as far as the machine has them.",
        choices=("auto", "shm", "tcp", "nccl"),
        not_empty=True,
    )
    lease_s: float = key(
        30.0,
        "How long a prefill worker holds finished blocks for a decode worker that is silent.",
        minimum=0.1,
        maximum=3600,
    )
    receive_timeout_s: float = key(
        30.0,
        "How long a decode worker waits between two signs of life of a transfer.",
        minimum=0.1,
        maximum=3600,
    )
    digest: str = key(
        "auto",
        "Which chunks a prefill worker sends with a digest, for the decode worker to check: all, "
        "one in sixteen, or none; auto is all. KV in GPU memory travels without digests.",
        choices=("auto", "always", "sampled", "off"),
    )
    staging_slots: int = key(
        4,
        "With nccl: staging slots a direction, in GPU memory beside the KV cache.",
        minimum=2,
        maximum=256,
    )
    staging_slot_bytes: int = key(
        32 << 20,
        "Size of a staging slot; it must hold a block of all layers.",
        minimum=1,
        maximum=1 << 32,
    )
    nccl_budget_bytes: int = key(
        512 << 20,
        "GPU memory that all NCCL communicators may hold together, beside the KV cache.",
        minimum=1,
        maximum=1 << 40,
    )
    nccl_max_ctas: int = key(
        4, "Thread blocks that one NCCL communicator may use.", minimum=1, maximum=32
    )
    nccl_init_timeout_s: float = key(
        20.0,
        "How long two workers may take to make an NCCL communicator.",
        minimum=0.1,
        maximum=3600,
    )
    nccl_library: str = key("", "NCCL's library file; empty takes the one that torch brings.")

    def __post_init__(self) -> None:
        check(self)
        if len(set(self.transports)) != len(self.transports):
            refuse("transports", f"names one twice: {', '.join(self.transports)}")
        if "auto" in self.transports and len(self.transports) > 1:
            refuse("transports", "has `auto` beside others; give it alone")


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """One worker: an engine in one role."""

    worker_id: str = key("", "Name of the worker; empty takes one from role and process.")
    role: Role = key(Role.AGGREGATED, "What the worker does with a request.")
    engine: str = key(
        "vllm", "Engine: vLLM, or a scripted one without a model.", choices=("vllm", "fake")
    )
    model: str = key(
        DEMO_MODEL, "Directory of the model, or `demo` for the one shipped.", not_empty=True
    )
    model_name: str = key(
        "", "Name under which the model is served; empty takes the directory's name."
    )
    host: str = key("127.0.0.1", "Address at which the router reaches the worker.", not_empty=True)
    port: int = key(0, "Port of the worker; 0 takes a free one.", minimum=0, maximum=65535)
    debug_host: str = key(
        "127.0.0.1", "Address of the HTTP face for metrics and debugging; empty for none."
    )
    debug_port: int = key(0, "Port of that face; 0 takes a free one.", minimum=0, maximum=65535)
    routers: tuple[str, ...] = key(
        ("127.0.0.1:8001",), "gRPC addresses of the routers to register with.", not_empty=True
    )
    cores: tuple[int, ...] = key(
        (), "CPU cores the engine is pinned to; empty pins to none.", minimum=0
    )
    gpus: tuple[int, ...] = key(
        (),
        "GPUs that the engine may use, by NVML's index; empty leaves it all that are visible.",
        minimum=0,
    )
    kv: KvConfig = section(KvConfig, "How KV blocks travel between workers.")
    gpu: GpuConfig = section(
        GpuConfig, "What a worker's GPUs may be like before it takes no more work."
    )
    access: AccessConfig = section(AccessConfig, "Who may connect, and as what.")
    engine_args: Mapping[str, object] = key(
        {}, "Passed on to vLLM's engine arguments, under vLLM's names."
    )
    otlp_endpoint: str = key(
        "", "Where spans go by OTLP over gRPC, as `http://host:4317`; empty makes none."
    )
    drain_timeout_s: float = key(
        30.0,
        "How long streams on a stopping worker have before they go on elsewhere.",
        minimum=0,
    )
    log_level: str = key("info", "Least level that is logged.", choices=LOG_LEVELS)

    def __post_init__(self) -> None:
        check(self)
        _check_otlp(self.otlp_endpoint)
        for address in self.routers:
            host, _, port = address.rpartition(":")
            if not host or not port.isdecimal() or not 0 < int(port) <= 65535:
                refuse("routers", f"must be host:port addresses, not {address!r}")
        if len(set(self.cores)) != len(self.cores):
            refuse("cores", "names one core twice")
        check_worker(self)

    @property
    def model_path(self) -> Path:
        """The model's directory. Raises ConfigError where it holds no model."""
        if self.model == DEMO_MODEL:
            # Imported late: reading a configuration needs no model.
            from pdserve.demo import MODEL_DIR

            path = Path(MODEL_DIR)
        else:
            path = Path(self.model).expanduser().resolve()
        if not (path / "config.json").is_file():
            refuse("model", f"{path} is not a model directory: it has no config.json")
        return path

    @property
    def served_model_name(self) -> str:
        """The name that clients ask for."""
        if self.model_name:
            return self.model_name
        return DEMO_MODEL_NAME if self.model == DEMO_MODEL else Path(self.model).name


@dataclass(frozen=True, slots=True)
class UpConfig:
    """`pdserve up`: which processes to start together."""

    prefill: int = key(1, "Prefill workers to start.", minimum=0, maximum=1024)
    decode: int = key(1, "Decode workers to start.", minimum=0, maximum=1024)
    aggregated: int = key(
        0, "Workers to start that prefill and decode alike.", minimum=0, maximum=1024
    )
    routers: int = key(
        1,
        "Routers to start side by side. The first has the ports of `router`, each other one those "
        "10 above the one before it.",
        minimum=1,
        maximum=16,
    )
    cores_per_worker: int = key(
        0, "CPU cores for each worker; 0 shares out those there are.", minimum=0
    )
    gpus_per_worker: int = key(
        0,
        "GPUs for each worker, none twice; 0 gives each as many as its tensor_parallel_size, some "
        "the same ones where there are too few. Without GPUs, or a vLLM for them, of no effect.",
        minimum=0,
    )
    start_timeout_s: float = key(
        300.0, "How long all processes may take to become ready.", minimum=1, maximum=86400
    )
    max_restarts: int = key(
        5, "Times a worker that dies is started again before `up` gives up.", minimum=0
    )
    ready_file: str = key(
        "", "File to write once all are ready: addresses, process ids and first roles, as JSON."
    )
    run_dir: str = key("", "Directory for the processes' logs; empty makes one.")

    def __post_init__(self) -> None:
        check(self)
        if bool(self.prefill) != bool(self.decode):
            lacking = "decode" if self.prefill else "prefill"
            refuse(lacking, "must be at least 1 where the other of prefill and decode is")
        if not self.prefill + self.decode + self.aggregated:
            refuse("prefill", "no worker at all was asked for")


@dataclass(frozen=True, slots=True)
class Config:
    """The whole file."""

    up: UpConfig = section(UpConfig, "What `pdserve up` starts.")
    router: RouterConfig = section(RouterConfig, "The router: its two faces and what it admits.")
    worker: WorkerConfig = section(
        WorkerConfig,
        "A worker. `pdserve up` makes every worker after this one and chooses `worker_id`, "
        "`role`, `port`, `debug_port`, `routers` and `cores` itself.",
    )


def load_config(path: Path | None, changes: Mapping[str, object]) -> Config:
    """The file at `path`, or nothing, under `changes` (dotted keys). Raises ConfigError."""
    raw = read_file(path) if path is not None else {}
    return parse(Config, overlay_keys(raw, changes))


def _check_otlp(endpoint: str) -> None:
    if endpoint and not endpoint.startswith(("http://", "https://")):
        refuse("otlp_endpoint", f"must begin with http:// or https://, not {endpoint!r}")
