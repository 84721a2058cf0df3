"""Options that set configuration keys, shared by the commands that serve."""

from __future__ import annotations

ENGINE = {
    "--model": "worker.model",
    "--model-name": "worker.model_names",
    "--engine": "worker.engine",
    "--kv-transport": "worker.kv.transports",
}
PARSERS = {
    "--tool-call-parser": "router.parsers.tool_calls",
    "--reasoning-parser": "router.parsers.reasoning",
}
ROUTER = {
    "--http-host": "router.http.host",
    "--http-port": "router.http.port",
    "--shared-http-port": "router.http.shared_port",
    "--grpc-port": "router.grpc.port",
    "--require-auth": "router.access.require_auth",
    **PARSERS,
}
_POOLS = {
    "--prefill": "up.prefill.workers",
    "--decode": "up.decode.workers",
    "--max-prefill": "up.prefill.max_workers",
    "--max-decode": "up.decode.max_workers",
    "--aggregated": "up.aggregated.workers",
    "--pooling": "up.pooling.workers",
    "--encode": "up.encode.workers",
    "--routers": "up.routers",
}
# `pdserve upgrade` lacks these, which apply to one machine.
_FILES = {"--ready-file": "up.ready_file", "--run-dir": "up.run_dir"}
PROCESSES = {**_POOLS, **_FILES}
UPGRADE = {**_POOLS, **ENGINE, **ROUTER}
UP = {**PROCESSES, **ENGINE, **ROUTER}
