"""Old names of keys, which this version accepts with a warning, and keys that it refuses."""

from __future__ import annotations

from collections.abc import Mapping

# Old name -> name, in the sections `router` and `worker`. A section here stands for all its keys.
_ROUTER = {
    "http_host": "http.host",
    "http_port": "http.port",
    "shared_http_port": "http.shared_port",
    "cors_origins": "http.cors_origins",
    "allowed_hosts": "http.allowed_hosts",
    "grpc_host": "grpc.host",
    "grpc_port": "grpc.port",
    "max_running_requests": "queue.max_running_requests",
    "max_queued_requests": "queue.max_queued_requests",
    "queue_timeout_s": "queue.timeout_s",
    "retry_tokens_per_s": "retry.tokens_per_s",
    "max_worker_deaths": "retry.max_worker_deaths",
    "store": "store.database",  # if it is no mapping
    "store_files": "store.files",
    "batch.max_file_mib": "store.max_file_mib",
    "quotas": "store.quotas",
    "retention": "store.retention",
    "tool_call_parser": "parsers.tool_calls",
    "reasoning_parser": "parsers.reasoning",
    "parser_command": "parsers.command",
    "log_level": "log.level",
    "log_format": "log.format",
    "access_log": "log.access",
    "audit_log": "log.audit",
}
_WORKER = {
    "debug_host": "debug.host",
    "debug_port": "debug.port",
    "log_level": "log.level",
    "log_format": "log.format",
    "nnodes": "nodes.count",
    "node_rank": "nodes.rank",
    "master_addr": "nodes.address",
    "master_port": "nodes.port",
    "data_parallel_size": "data_parallel.size",
    "data_parallel_rank": "data_parallel.rank",
    "data_parallel_address": "data_parallel.address",
    "data_parallel_port": "data_parallel.port",
    "data_parallel_group": "data_parallel.group",
    "session_lease": "retention",
    "kv.lease_s": "kv.hold_s",
}
RENAMED = {
    f"{section}.{old}": f"{section}.{new}"
    for section, names in (("router", _ROUTER), ("worker", _WORKER))
    for old, new in names.items()
}

# The last part of a removed key -> what to use in its place.
REMOVED = {"connector": "was removed: for NIXL, set transports to [nixl]"}


def is_old(old: str, value: object) -> bool:
    """Return True if the key `old` of RENAMED is the old one, given its value. The name may also be
    a section today."""
    return not (RENAMED[old].startswith(f"{old}.") and isinstance(value, Mapping))


def current_name(dotted: str, value: object) -> str:
    """Return the name today of a key that was given by an old or current name."""
    for old, new in RENAMED.items():
        if dotted == old and is_old(old, value):
            return new
        if dotted.startswith(f"{old}.") and not new.startswith(f"{old}."):
            return new + dotted.removeprefix(old)
    return dotted
