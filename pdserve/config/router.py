"""The section `router`: its listeners, admission, placement and store."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from msgspec import Meta, field

from pdserve.config.access import RouterAccessConfig, TenantConfig
from pdserve.config.fields import (
    Amount,
    Count,
    Days,
    Duration,
    Endpoint,
    Lease,
    Port,
    Positive,
    Seconds,
    Section,
    Text,
    about,
    check_exposed,
    is_address,
    is_exposed,
    refuse,
)
from pdserve.config.guards import GuardConfig  # noqa: TC001 - msgspec reads it
from pdserve.config.process import LogConfig, TopologyConfig
from pdserve.config.virtual_models import VirtualModelConfig  # noqa: TC001 - msgspec reads it


class HttpConfig(Section, frozen=True):
    """The HTTP listener."""

    host: Annotated[Text, about("Address of the listener.")] = "127.0.0.1"
    port: Annotated[Port, about("Port of the listener. 0: a free one.")] = 8000
    shared_port: Annotated[
        Port,
        about("""A port that several routers of one machine share: each connection goes to one of
        them. 0: none."""),
    ] = 0
    cors_origins: Annotated[
        tuple[Text, ...],
        about("""Origins whose pages may use the HTTP API from a browser, such as
        `https://chat.example.com`; `*` is any. Cookies are never accepted."""),
    ] = ()
    allowed_hosts: Annotated[
        tuple[Text, ...],
        about("""Host names that requests may use while there are no `tenants`, such as the name of
        a reverse proxy or of a Kubernetes Service; `*` is any. IP addresses, `localhost` and the
        name of this machine are always accepted. This keeps out web pages whose host name resolves
        to this machine."""),
    ] = ()

    def __post_init__(self) -> None:
        if self.shared_port and self.shared_port == self.port:
            refuse("shared_port", "must differ from port")


class GrpcConfig(Section, frozen=True):
    """The gRPC listener, for clients and workers."""

    host: Annotated[Text, about("Address of the listener.")] = "127.0.0.1"
    port: Annotated[Port, about("Port of the listener. 0: a free one.")] = 8001


class QueueConfig(Section, frozen=True):
    """How many requests run and wait."""

    max_running_requests: Annotated[
        Count,
        about("""Requests that run on workers at a time. 0: as many as the engines of all workers
        have slots for (`max_num_seqs`)."""),
    ] = 0
    max_queued_requests: Annotated[
        Count, about("Requests that may wait. More are rejected with 429.")
    ] = 1024
    timeout_s: Annotated[
        Seconds,
        about("""Seconds that a request waits while no worker of a role is ready. Then it ends with
        503."""),
    ] = 30.0


class RetryConfig(Section, frozen=True):
    """How often requests run again after failures."""

    tokens_per_s: Annotated[
        Amount,
        about("""Retry budget of a model: average prompt and output tokens per second that are
        computed again after failures. Requests beyond it fail with 503. 0: no limit."""),
    ] = 20000.0
    max_worker_deaths: Annotated[
        Positive,
        about("""Workers that may die while they run a request. Then it is refused with 422, and so
        is an equal request for ten minutes. The count starts again once the answer has advanced by
        16 tokens on another worker."""),
    ] = 2


# An `inference_geo` that is any region, as in Anthropic's API.
GLOBAL = "global"


class SloConfig(Section, frozen=True):
    """Latency targets. Admission and the policy `slo_aware` use them."""

    ttft_s: Annotated[
        float, Meta(ge=0.001, le=3600), about("Seconds to the first token (TTFT).")
    ] = 1.0
    tpot_s: Annotated[
        float, Meta(ge=0.0001, le=3600), about("Seconds per output token after the first (TPOT).")
    ] = 0.1
    reject_factor: Annotated[
        float,
        Meta(ge=0, le=1000),
        about("""Reject an interactive request if its predicted TTFT exceeds `reject_factor ×
        ttft_s`. Queue it if its predicted TPOT exceeds `reject_factor × tpot_s`. 0 disables
        both."""),
    ] = 0.0


class WeightsConfig(Section, frozen=True):
    """Updates of a model's weights while it is served. Off without `directories`."""

    directories: Annotated[
        tuple[Text, ...],
        about("""Directories on the workers' machines from which weights may be loaded, at any
        depth; `worker.weights_directories` has to allow them, too. Empty: no updates."""),
    ] = ()
    mode: Annotated[
        Literal["wait", "abort", "keep"],
        about("""What happens to open answers: `wait` until they end, `abort` them with the tokens
        that they have, or `keep` them: they continue with the new weights, as `stale_kv` says."""),
    ] = "wait"
    stale_kv: Annotated[
        Literal["recompute", "allow", "abort"],
        about("""What happens to an answer that has tokens of older weights, with `keep` or after a
        failure, if its request does not say: `recompute` continues it with the new weights, its
        prompt and tokens computed again; `allow` continues it with the KV that it has, of the old
        weights; `abort` ends it with the tokens that it has."""),
    ] = "recompute"
    timeout_s: Annotated[
        Amount, about("Seconds for open answers to end with `wait`; then nothing is updated.")
    ] = 60.0
    hold_s: Annotated[
        Seconds,
        about("""Seconds after which workers serve again by themselves if the router that updates
        them is gone."""),
    ] = 60.0
    commit_timeout_s: Annotated[
        Seconds,
        about("""Seconds for a worker to check weights, and to load them; then it is left out."""),
    ] = 1800.0


class ResidencyConfig(Section, frozen=True):
    """Where the data of requests may be. With regions, `router.topology.region` must be one of
    them: a router serves only what may be in its own region."""

    regions: Annotated[
        tuple[Text, ...],
        about("""The regions that tenants and requests may name, as in `worker.topology.region`. A
        worker in none of them gets only requests that may be anywhere."""),
    ] = ()
    ledger: Annotated[
        str,
        about("""File to which a line of JSON is appended for each transfer of a request's data, and
        for what is stored of it; `-` is standard output. `pdserve residency` reads it. Empty:
        none."""),
    ] = ""

    def __post_init__(self) -> None:
        for name in self.regions:
            # A request names one in a header, and several are shown with a plus sign.
            if name == GLOBAL or not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", name):
                refuse("regions", f"{name!r} must be 1 to 64 letters, digits or ._-, not {GLOBAL}")


class PeerConfig(Section, frozen=True):
    """A router of another region, or the address that several of its routers share."""

    region: Annotated[str, about("Its `router.topology.region`.")] = ""
    address: Annotated[str, about("host:port of its gRPC listener.")] = ""
    tls_name: Annotated[
        str,
        about("""Name in its certificate. Empty: `access.tls.peer_name`, or the host of
        `address`."""),
    ] = ""
    delay_s: Annotated[
        Seconds,
        about("""Round trip of the link in seconds, which is added to the TTFT that the region
        predicts. 0: as measured."""),
    ] = 0.0
    spill_over: Annotated[
        bool,
        about("""Use it also while this region misses `slo.ttft_s`, if it is predicted to be
        faster. Otherwise it gets only what this region cannot serve."""),
    ] = True

    def __post_init__(self) -> None:
        if not self.region:
            refuse("region", "must not be empty")
        if not is_address(self.address):
            refuse("address", f"{self.address!r} is not host:port")


class AuditConfig(Section, frozen=True):
    """Audits: an answer is computed again on an idle worker, and the tokens are compared."""

    one_in: Annotated[
        Count,
        about("""One in this many answers of a model is audited: one that was handed over, moved or
        resumed, or used cached KV, more probably than another. 0: none."""),
    ] = 0
    models: Annotated[
        dict[Text, Count], about("`one_in` for single models, by name: `{m: 100}`.")
    ] = field(default_factory=dict)
    tenants: Annotated[
        dict[Text, Count],
        about("`one_in` for single tenants, by name. It precedes `models`; 0: never."),
    ] = field(default_factory=dict)
    margin: Annotated[
        Amount,
        about("""Largest difference of two logprobs that counts as a near tie, in nats. 0: by the
        model's dtype, 0.01 for float32 and 0.5 for others."""),
    ] = 0.0
    max_tokens: Annotated[
        Positive, about("Largest prompt and answer together that are audited, in tokens.")
    ] = 4096
    max_waiting: Annotated[
        Positive, about("Answers that may wait for an idle worker. More are skipped.")
    ] = 64
    max_age_s: Annotated[
        Duration, about("Seconds that an answer waits for an idle worker before it is skipped.")
    ] = 600.0
    eject_s: Annotated[
        Seconds,
        about("""Seconds for which a worker, or a pair of workers, gets no requests after a second
        difference. `health.eject_s` of 0 disables this, too."""),
    ] = 3600.0

    @property
    def is_on(self) -> bool:
        """True if some answer may be audited."""
        return any((self.one_in, *self.models.values(), *self.tenants.values()))


class RolesConfig(Section, frozen=True):
    """When the router moves workers between prefill and decode."""

    auto: Annotated[
        bool,
        about("""Change roles by load. Otherwise only `pdserve role` does. Enable it on one router
        only. Metrics show the loads in both cases."""),
    ] = False
    window_s: Annotated[
        Duration,
        about("""Seconds over which loads are averaged, and for which another split must be
        better. After a role change, and after a worker joined or left, no role changes for
        twice as long."""),
    ] = 30.0


class HealthConfig(Section, frozen=True):
    """When a worker that is alive gets no requests."""

    stall_s: Annotated[
        float,
        Meta(ge=0, le=3600),
        about("""Seconds without a step after which the requests of a busy worker continue on other
        workers; longer while a step is expected to take longer. 0: never."""),
    ] = 2.0
    eject_s: Annotated[
        Seconds,
        about("""Seconds for which a worker is ejected after three failures in a row; longer while
        probes fail. A pair of workers is ejected for six times as long after KV was damaged
        between them. 0: never."""),
    ] = 10.0


class QuotaConfig(Section, frozen=True):
    """What each tenant may keep in the store. A file or batch beyond it is refused with 403. Of
    responses, the conversations that were not used for longest are deleted."""

    files: Annotated[Positive, about("Number of files.")] = 1000
    files_mib: Annotated[Positive, about("Size of all files, in MiB.")] = 4096
    batches: Annotated[
        Positive, about("Number of batches, including ended ones that are still listed.")
    ] = 1000
    batch_lines: Annotated[
        Positive, about("Number of lines of all batches that have not ended.")
    ] = 200_000
    responses: Annotated[Positive, about("Number of stored responses.")] = 10_000
    responses_mib: Annotated[Positive, about("Size of all stored responses, in MiB.")] = 1024


class RetentionConfig(Section, frozen=True):
    """How long the store keeps files, batches and responses."""

    files_days: Annotated[
        Days,
        about("""Days that a file is kept after its creation, unless `expires_after` of the upload
        says otherwise."""),
    ] = 30.0
    batches_days: Annotated[Days, about("Days that a batch is kept after its end.")] = 30.0
    responses_days: Annotated[
        Days, about("Days that a response is kept after the last response of its conversation.")
    ] = 30.0


class StoreConfig(Section, frozen=True):
    """Where the router keeps files, batches, responses and idempotency keys."""

    database: Annotated[
        str,
        about("""A folder: SQLite, for routers of one host. `postgresql://user@host/database`: for
        routers of any host; the password may come from PGPASSWORD or a pgpass file. Empty:
        `pdserve up` uses its run directory, which lasts if `up.run_dir` is set; `pdserve router`
        keeps everything until it ends."""),
    ] = ""
    files: Annotated[
        str,
        about("""Folder or bucket (`s3://bucket/prefix`) for the content of files, used by this
        store only. All routers must reach it. Empty: the folder of `database`; PostgreSQL
        needs one."""),
    ] = ""
    max_file_mib: Annotated[
        int, Meta(ge=1, le=1 << 20), about("Largest file that a client may upload, in MiB.")
    ] = 200
    quotas: QuotaConfig = QuotaConfig()
    retention: RetentionConfig = RetentionConfig()


class CapsulesConfig(Section, frozen=True):
    """Incident capsules: what the router knows of a request that failed, of an answer that was
    found to be wrong, and of a request that an administrator names. See docs/capsules.md."""

    directory: Annotated[
        str,
        about("""Folder for capsules, which routers of one region may share. Empty: `pdserve up`
        uses its run directory; `pdserve router` keeps none."""),
    ] = ""
    key_file: Annotated[
        str,
        about("""File with secrets of at least 32 characters, one a line. Capsules are encrypted
        with the first one. A changed file is read again. Empty: capsules are not encrypted, and
        only the router's user can read them."""),
    ] = ""
    prompts: Annotated[
        bool,
        about("""Keep the tokens of prompts, and texts of sampling parameters (stop strings,
        schemas). Without them a capsule cannot be replayed."""),
    ] = False
    recent: Annotated[
        Count,
        about("""Ended requests, of at most 16 MiB, of which a capsule can be made on demand. 0:
        none."""),
    ] = 256
    max_capsules: Annotated[Positive, about("Capsules in `directory`. The oldest are deleted.")] = (
        1000
    )
    max_capsules_per_tenant: Annotated[
        Positive, about("Capsules of one tenant, so that its failures do not displace others'.")
    ] = 200
    max_mib: Annotated[Positive, about("Size of all capsules, in MiB.")] = 256
    days: Annotated[Days, about("Days that a capsule is kept.")] = 7.0


class ImagesConfig(Section, frozen=True):
    """Images in prompts, for models that take them."""

    url_hosts: Annotated[
        tuple[Text, ...],
        about("""Hosts from which the router fetches images that a request names by an http or
        https URL, such as `images.example.com`; `*.example.com` is any subdomain, `*` any
        host. It never fetches from private addresses. Empty: a request must have its images in
        data URLs."""),
    ] = ()
    memory_mib: Annotated[Positive, about("Memory for the images of open requests, in MiB.")] = 1024
    disk_mib: Annotated[
        Count,
        about("""Disk space for further images in the directory for temporary files (TMPDIR), in
        MiB. 0: none. If memory and disk are full, requests with images are rejected with 429."""),
    ] = 1024


class ParsersConfig(Section, frozen=True):
    """vLLM's parsers of answers. They need vLLM where the router runs."""

    tool_calls: Annotated[
        Text,
        about("""Parser of tool calls. `auto`: the parser that fits the chat template of the model.
        `none`: requests with tools are refused."""),
    ] = "auto"
    reasoning: Annotated[
        Text,
        about("""Parser of reasoning. `auto`: the parser that fits the chat template of the
        model, for requests that may get reasoning. `none`: reasoning is text like any other."""),
    ] = "auto"
    command: Annotated[
        tuple[Text, ...],
        about("""Command of the process that runs these parsers, with each argument as an item;
        `--socket FD --parent-pid PID` is appended. Empty: the command of the installed
        package."""),
    ] = ()


class RouterLogConfig(LogConfig, frozen=True):
    """Logs of the router."""

    access: Annotated[
        str,
        about("""File to which a line of JSON is appended for each answer of the HTTP and gRPC
        APIs; `-` is standard output. Empty: none."""),
    ] = ""
    audit: Annotated[
        str,
        about("""File to which a line of JSON is appended for each action of an administrator; `-`
        is standard output. Empty: the lines are in the router's log."""),
    ] = ""


class RouterConfig(Section, frozen=True):
    """The router: its listeners, admission, placement and store."""

    http: HttpConfig = HttpConfig()
    grpc: GrpcConfig = GrpcConfig()
    policy: Annotated[
        Literal[
            "always_aggregated",
            "least_loaded",
            "power_of_two",
            "prefix_aware",
            "round_robin",
            "slo_aware",
        ],
        about("How workers are chosen for a request."),
    ] = "slo_aware"
    queue: QueueConfig = QueueConfig()
    tenants: Annotated[
        tuple[TenantConfig, ...],
        about("Tenants by API key. Without tenants, every caller is served."),
    ] = ()
    on_demand_models: Annotated[
        tuple[Text, ...],
        about("""Names of models that may have no worker. Requests for such a model wait for its
        start. `pdserve up` adds the models that `up.scaling.to_zero_after_s` stops."""),
    ] = ()
    virtual_models: Annotated[
        tuple[VirtualModelConfig, ...],
        about("""Names that stand for several models: rules choose one for each request. See
        docs/model-tiers.md."""),
    ] = ()
    request_timeout_s: Annotated[
        Duration, about("Deadline in seconds of a request that has none.")
    ] = 600.0
    session_idle_s: Annotated[
        Amount,
        about("""Seconds that the router remembers a session after its last answer, to prefer
        workers that have its history. 0: it does not."""),
    ] = 1800.0
    fetch_cached_kv: Annotated[
        bool,
        about("""Copy KV of a prompt from a worker that has it cached to the worker that computes
        the prompt, if the copy is predicted to be faster than computing it."""),
    ] = True
    lease_s: Annotated[
        Lease, about("Lease of a worker in seconds. A worker that does not renew it is lost.")
    ] = 5.0
    access: RouterAccessConfig = RouterAccessConfig()
    roles: RolesConfig = RolesConfig()
    health: HealthConfig = HealthConfig()
    audit: AuditConfig = AuditConfig()
    topology: TopologyConfig = TopologyConfig()
    residency: ResidencyConfig = ResidencyConfig()
    peers: Annotated[
        tuple[PeerConfig, ...],
        about("""Routers of other regions. A request that this region cannot serve goes to the one
        that is predicted to answer first, if its data may be there (`docs/regions.md`)."""),
    ] = ()
    weights: WeightsConfig = WeightsConfig()
    retry: RetryConfig = RetryConfig()
    store: StoreConfig = StoreConfig()
    capsules: CapsulesConfig = CapsulesConfig()
    otlp_endpoint: Annotated[
        Endpoint, about("OTLP/gRPC endpoint for spans, `http://host:4317`. Empty: no traces.")
    ] = ""
    stop_grace_s: Annotated[
        Amount, about("Seconds that open requests have after SIGTERM. An idle router ends at once.")
    ] = 120.0
    body_processes: Annotated[
        int,
        Meta(ge=0, le=32),
        about("""Processes that read, render and tokenise bodies over 64 KiB, each with up to 2 GiB
        of memory. They start when bodies wait. 0: one fewer than the router's cores, 1 to 4."""),
    ] = 0
    memory_limit_mib: Annotated[
        Amount,
        about("""Memory of the router and its processes, in MiB. Near it, new requests get 429. 0:
        the limit of its control group (container)."""),
    ] = 0.0
    slo: SloConfig = SloConfig()
    images: ImagesConfig = ImagesConfig()
    prices: Annotated[
        dict[Text, Amount],
        about("""Price of an hour of one GPU by its name or a part of the name, or of one core
        under `cpu`, in any currency: `{H100: 2.5, cpu: 0.04}`. The longest name that matches
        counts. With prices, receipts and metrics have costs."""),
    ] = field(default_factory=dict)
    parsers: ParsersConfig = ParsersConfig()
    guards: Annotated[
        tuple[GuardConfig, ...],
        about("""What checks prompts and answers, in this order: each guard gets what the one before
        let pass."""),
    ] = ()
    log: RouterLogConfig = RouterLogConfig()

    def __post_init__(self) -> None:
        names = [tenant.name for tenant in self.tenants]
        hashes = [text for tenant in self.tenants for text in tenant.keys]
        if len(set(names)) != len(names):
            refuse("tenants", "two tenants have the same name")
        if len(set(hashes)) != len(hashes):
            refuse("tenants", "two tenants have the same key")
        self._check_regions()
        self._check_peers()
        self._check_guards(names)
        if unknown := [x for x in self.audit.tenants if x not in names]:
            refuse("audit.tenants", f"{unknown[0]!r} is none of router.tenants")
        self._check_virtual_models(names)
        if self.http.shared_port and self.http.shared_port == self.grpc.port:
            refuse("http.shared_port", "must differ from grpc.port")
        access, tls = self.access, self.access.tls
        if access.require_auth:
            http, api = self.http.host, self.grpc.host
            token = "access.tls.ca_file or access.worker_token_file (workers)"
            admin = "access.tls.ca_file or access.admin_keys (administrators)"
            check_exposed(
                (http, self.tenants or access.http_tls.ca_file, "tenants (API keys)"),
                (http, access.http_tls.cert_file, "access.http_tls.cert_file"),
                (api, self.tenants or tls.is_mutual, "tenants (API keys)"),
                (api, tls.cert_file, "access.tls.cert_file"),
                (api, tls.is_mutual or access.worker_token_file, token),
                (api, tls.is_mutual or access.admin_keys or access.admin_key_file, admin),
            )

    def _check_virtual_models(self, tenants: list[str]) -> None:
        virtual = [x.name for x in self.virtual_models]
        if len(set(virtual)) != len(virtual):
            refuse("virtual_models", "two virtual models have the same name")
        for i, model in enumerate(self.virtual_models):
            for key, name in model.named():
                if name in virtual:
                    text = f"{name!r} is a virtual model, which could lead to a cycle: name a model"
                    refuse(f"virtual_models[{i}].{key}", text)
            for j, rule in enumerate(model.rules):
                if unknown := [x for x in rule.tenants if x not in tenants]:
                    text = f"{unknown[0]!r} is none of router.tenants"
                    refuse(f"virtual_models[{i}].rules[{j}].tenants", text)
        for i, tenant in enumerate(self.tenants):
            if named := [x for x in tenant.allowed_models if x in virtual]:
                text = f"{named[0]!r} is a virtual model: list the models that it may choose"
                refuse(f"tenants[{i}].allowed_models", text)

    def _check_regions(self) -> None:
        """Refuse a region in which nothing can be: a typing error must not become a rule."""
        regions = self.residency.regions
        known = ", ".join(regions) or "none"
        if regions and self.topology.region not in regions:
            refuse("topology.region", f"must be one of residency.regions: {known}")
        for i, tenant in enumerate(self.tenants):
            for key in ("allowed_inference_geos", "default_inference_geo", "storage_geo"):
                given = getattr(tenant, key)
                for name in (given,) if isinstance(given, str) else given:
                    if name and name not in regions:
                        text = f"{name!r} is not one of residency.regions: {known}"
                        refuse(f"tenants[{i}].{key}", text)

    def _check_peers(self) -> None:
        regions, own = self.residency.regions, self.topology.region
        if self.peers and not own:
            refuse("topology.region", "is required with peers")
        if self.peers and self.access.asks_for_roles and not self.access.knows_peers:
            text = "or access.tls.ca_file is required with peers: they must authenticate"
            refuse("access.peer_token_file", text)
        for i, peer in enumerate(self.peers):
            if peer.region == own:
                refuse(f"peers[{i}].region", f"is {own!r}, the region of this router")
            if regions and peer.region not in regions:
                known = ", ".join(regions)
                text = f"{peer.region!r} is not one of residency.regions: {known}"
                refuse(f"peers[{i}].region", text)
            if peer.region in [x.region for x in self.peers[:i]]:
                refuse(f"peers[{i}].region", f"{peer.region!r} is named twice")

    def _check_guards(self, tenants: list[str]) -> None:
        names = [guard.name for guard in self.guards]
        if len(set(names)) != len(names):
            refuse("guards", "two guards have the same name")
        for i, guard in enumerate(self.guards):
            if wrong := [x for x in guard.tenants if x not in tenants]:
                refuse(f"guards[{i}].tenants", f"{wrong[0]!r} is not one of the tenants")
            regions = self.residency.regions
            if guard.region and guard.region not in regions:
                known = ", ".join(regions) or "none"
                text = f"{guard.region!r} is not one of residency.regions: {known}"
                refuse(f"guards[{i}].region", text)

    @property
    def has_console(self) -> bool:
        """True if somebody may open the console: see docs/console.md."""
        access = self.access
        needs_key = self.tenants or access.tls.is_mutual or is_exposed(self.http.host)
        return bool(access.admin_keys) or not needs_key


# Keys of RouterConfig that a running router takes from its changed file.
LIVE_KEYS = ("tenants", "slo", "prices", "access.admin_keys", "http.cors_origins", "log.level")
