"""What can be found wrong before anything is started."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from pdserve.config import refuse
from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from pdserve.config import RouterConfig, WorkerConfig


def check_model(worker: WorkerConfig) -> None:
    """Raises ConfigError where the model's directory holds none."""
    try:
        _ = worker.model_path
    except ConfigError as error:
        refuse("worker.model", error.message.removeprefix("model: "))


def check_ports(router: RouterConfig) -> None:
    """Raises ConfigError where a port that was asked for is taken, or its host is not ours.

    It is a courtesy: a port taken in between makes the router die with its own message.
    """
    if router.http_port and router.http_port == router.grpc_port:
        refuse("router.grpc_port", f"is {router.grpc_port}, as http_port is; they must differ")
    for face, key in (("http", "http"), ("grpc", "grpc"), ("http", "shared_http")):
        host, port = getattr(router, f"{face}_host"), getattr(router, f"{key}_port")
        try:
            family, kind, proto, _, address = socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
        except OSError as error:
            refuse(f"router.{face}_host", f"{host} is not an address: {error}")
        with socket.socket(family, kind, proto) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(address)
            except OSError as error:
                reason = f"cannot listen on {host}:{port} ({error.strerror})"
                refuse(f"router.{key}_port", f"{reason}; choose another, or 0 for a free one")
