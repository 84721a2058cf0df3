"""Options that several commands share, and how they reach a service."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdserve.config import Config, all_keys, load_config, read_yaml, refuse

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Callable, Mapping

    import grpc.aio
    from google.protobuf.message import Message

    from pdserve.config import Key
    from pdserve.rpc import Dialer

Subparsers = argparse._SubParsersAction  # argparse has no public name for it

KEY_VARIABLE = "PDSERVE_API_KEY"
DEFAULT_URL = "http://127.0.0.1:8000"
DEFAULT_GRPC = "127.0.0.1:8001"
_TLS_OPTIONS = {
    "ca": ("FILE", "CAs of the service's certificate"),
    "cert": ("FILE", "client certificate"),
    "key": ("FILE", "private key of the client certificate"),
    "name": ("NAME", "name in the service's certificate, if it is not the host"),
}


def formatter(prog: str) -> argparse.HelpFormatter:
    return argparse.HelpFormatter(prog, max_help_position=30, width=110)


def add_config_options(parser: argparse.ArgumentParser, flags: Mapping[str, str]) -> None:
    """Add `--config`, `--set` and `flags` (option to dotted key). An option that is not given
    leaves the file's value."""
    parser.add_argument("--config", type=Path, metavar="FILE", help="configuration file")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="set any configuration key, such as router.lease_s=3; repeatable",
    )
    known = {key.dotted: key for key in all_keys()}
    group = parser.add_argument_group("configuration keys (`pdserve config` prints all)")
    for flag, dotted in flags.items():
        key = known[dotted]
        default = ",".join(map(str, x)) if isinstance(x := key.default, list) else key.default
        note = f" (default: {default})" if default not in ("", None, False) else ""
        text = key.description.partition(". ")[0].removesuffix(".").replace("%", "%%")
        group.add_argument(flag, dest=dotted, **_value(key), help=text + note)


def _value(key: Key) -> dict[str, Any]:
    if key.type_name == "boolean":
        return {"action": "store_const", "const": True}
    if key.type_name == "string" and key.choices:
        return {"choices": key.choices}
    if key.type_name.startswith("list"):
        return {
            "type": _integers if key.type_name.endswith("integer") else _words,
            "metavar": "A,B",
        }
    kinds: dict[str, tuple[Callable[[str], object], str]] = {
        "integer": (int, "N"),
        "number": (float, "SECONDS"),
    }
    kind, metavar = kinds.get(key.type_name, (str, "TEXT"))
    return {"type": kind, "metavar": metavar}


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",")]


def _integers(text: str) -> list[int]:
    return [int(word) for word in _words(text)]


def config_from(args: argparse.Namespace) -> Config:
    """Return the configuration that the options ask for. Raises ConfigError."""
    return load_config(args.config, changes_from(args))


def changes_from(args: argparse.Namespace) -> dict[str, object]:
    """Return the dotted keys that the options set. Raises ConfigError."""
    changes: dict[str, object] = {}
    for text in args.set:
        dotted, equals, value = text.partition("=")
        if not equals or not dotted:
            refuse("--set", f"must be KEY=VALUE, not {text!r}")
        changes[dotted] = read_yaml(f"value: {value}", f"--set {dotted}")["value"]
    given = {name: x for name, x in vars(args).items() if "." in name and x is not None}
    return changes | given


def add_grpc_option(parser: argparse._ActionsContainer, metavar: str = "HOST:PORT") -> None:
    parser.add_argument(
        "--grpc",
        default=DEFAULT_GRPC,
        metavar=metavar,
        help="gRPC address of the router (default: %(default)s)",
    )


def add_dial_options(parser: argparse._ActionsContainer) -> None:
    """Add how to reach a service with TLS, and how to authenticate."""
    group: argparse._ActionsContainer = parser
    if isinstance(parser, argparse.ArgumentParser):
        group = parser.add_argument_group("authentication and TLS")
    group.add_argument("--api-key", metavar="KEY", help=f"API key (default: ${KEY_VARIABLE})")
    group.add_argument(
        "--tls", action="store_true", help="use TLS; implied by the options that follow"
    )
    for name, (metavar, text) in _TLS_OPTIONS.items():
        variable = f"PDSERVE_TLS_{name.upper()}"
        group.add_argument(
            f"--tls-{name}",
            metavar=metavar,
            default=os.environ.get(variable, ""),
            help=f"{text} (default: ${variable})",
        )


def api_key_from(args: argparse.Namespace) -> str:
    given: str | None = args.api_key
    return os.environ.get(KEY_VARIABLE, "") if given is None else given


def dialer_from(args: argparse.Namespace) -> Dialer:
    """Return how to reach the service over gRPC. Raises ConfigError."""
    from pdserve.rpc import Dialer
    from pdserve.security.tls import tls_dialer

    values = {name: getattr(args, f"tls_{name}") for name in _TLS_OPTIONS}
    if not (args.tls or any(values.values())):
        return Dialer(token=api_key_from(args))
    for given, missing in (("cert", "key"), ("key", "cert")):
        if values[given] and not values[missing]:
            refuse(f"--tls-{missing}", f"is required with --tls-{given}")
    return tls_dialer(
        ca_file=values["ca"],
        cert_file=values["cert"],
        key_file=values["key"],
        peer_name=values["name"],
        token=api_key_from(args),
    )


def http_tls_from(args: argparse.Namespace) -> ssl.SSLContext | bool:
    """Return the `ssl` argument of aiohttp. Raises ConfigError."""
    if not (args.tls_ca or args.tls_cert):
        return True
    return dialer_from(args).context or True


@contextlib.asynccontextmanager
async def channel_to(
    dialer: Dialer, address: str
) -> AsyncIterator[tuple[grpc.aio.Channel, tuple[tuple[str, str], ...]]]:
    """Yield a channel and the metadata of its calls. Raises PdserveError for a failed call."""
    import grpc.aio

    from pdserve.errors import Unavailable
    from pdserve.rpc import error_from_rpc, has_error

    async with dialer.open_channel(address) as channel:
        try:
            yield channel, dialer.metadata
        except grpc.aio.AioRpcError as error:
            found = error_from_rpc(error)
            if isinstance(found, Unavailable) and not has_error(error):
                raise Unavailable(f"no router at {address}: {found.message}") from error
            raise found from error


def plain(message: Message) -> dict[str, Any]:
    """Return a protobuf message as JSON prints it."""
    from google.protobuf.json_format import MessageToDict

    return MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
