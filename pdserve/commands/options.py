"""Options that stand for configuration keys; help, type and default come from the schema."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdserve.config import Config, all_keys, load_config, read_yaml, refuse

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Mapping

    from pdserve.config import Key
    from pdserve.rpc import Dialer

Subparsers = argparse._SubParsersAction  # argparse has no public name for it

KEY_VARIABLE = "PDSERVE_API_KEY"
_TLS_OPTIONS = {
    "ca": ("FILE", "CAs of the service's certificate"),
    "cert": ("FILE", "certificate to show"),
    "key": ("FILE", "its private key"),
    "name": ("NAME", "name that the service's certificate has, where it is not its address"),
}
DEFAULT_URL = "http://127.0.0.1:8000"
DEFAULT_GRPC = "127.0.0.1:8001"


def add_config_options(parser: argparse.ArgumentParser, flags: Mapping[str, str]) -> None:
    """Add `--config`, `--set` and each flag of `flags`, which stands for the dotted key it maps
    to. An option that is not given leaves the file's value."""
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="configuration file (see `pdserve config`)"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="set any configuration key, such as router.lease_s=3; may be repeated",
    )
    known = {key.dotted: key for key in all_keys()}
    for flag, dotted in flags.items():
        info = known[dotted]
        default = ",".join(map(str, x)) if isinstance(x := info.default, list) else info.default
        note = f" (default: {default})" if default not in ("", None, False) else ""
        parser.add_argument(
            flag,
            dest=dotted,
            **_value(info),
            help=info.description.removesuffix(".").replace("%", "%%") + note,
        )


def add_key_option(parser: argparse._ActionsContainer) -> None:
    """How to say who asks."""
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        help=f"API key, where one is asked for (default: ${KEY_VARIABLE})",
    )


def api_key_from(args: argparse.Namespace) -> str:
    """The key that the option or the environment gives; empty for none."""
    given: str | None = args.api_key
    return os.environ.get(KEY_VARIABLE, "") if given is None else given


def add_dial_options(parser: argparse._ActionsContainer) -> None:
    """How to reach a service that speaks TLS, and how to say who asks."""
    add_key_option(parser)
    parser.add_argument(
        "--tls", action="store_true", help="speak TLS; any of the other --tls options implies it"
    )
    for name, (metavar, text) in _TLS_OPTIONS.items():
        variable = f"PDSERVE_TLS_{name.upper()}"
        parser.add_argument(
            f"--tls-{name}",
            metavar=metavar,
            default=os.environ.get(variable, ""),
            help=f"{text} (default: ${variable})",
        )


def dialer_from(args: argparse.Namespace) -> Dialer:
    """How the options say to reach a service. Raises ConfigError."""
    from pdserve.access.tls import tls_dialer
    from pdserve.rpc import Dialer

    values = {name: getattr(args, f"tls_{name}") for name in _TLS_OPTIONS}
    if not (args.tls or any(values.values())):
        return Dialer(token=api_key_from(args))
    for given, lacking in (("cert", "key"), ("key", "cert")):
        if values[given] and not values[lacking]:
            refuse(f"--tls-{lacking}", f"is needed where --tls-{given} is given")
    return tls_dialer(
        ca_file=values["ca"],
        cert_file=values["cert"],
        key_file=values["key"],
        peer_name=values["name"],
        token=api_key_from(args),
    )


def http_tls_from(args: argparse.Namespace) -> ssl.SSLContext | bool:
    """The same for https, as aiohttp takes it. Raises ConfigError."""
    if not (args.tls_ca or args.tls_cert):
        return True
    import ssl

    from pdserve.access.certificates import read_ca

    context = ssl.create_default_context()
    if args.tls_ca:
        context.load_verify_locations(cadata=read_ca(args.tls_ca, "--tls-ca").decode("ascii"))
    if args.tls_cert:
        dialer_from(args)  # says what is wrong with it
        context.load_cert_chain(args.tls_cert, args.tls_key)
    return context


def config_from(args: argparse.Namespace) -> Config:
    """The configuration that the options ask for. Raises ConfigError."""
    return load_config(args.config, changes_from(args))


def changes_from(args: argparse.Namespace) -> dict[str, object]:
    """The dotted keys that the options set over the file. Raises ConfigError."""
    changes: dict[str, object] = {
        name: x for name, x in vars(args).items() if "." in name and x is not None
    }
    for text in args.set:
        dotted, equals, value = text.partition("=")
        if not equals or not dotted:
            refuse("--set", f"must be KEY=VALUE, not {text!r}")
        changes[dotted] = read_yaml(f"value: {value}", f"--set {dotted}")["value"]
    return changes


def _value(info: Key) -> dict[str, Any]:
    if info.type_name == "boolean":
        return {"action": "store_const", "const": True}
    if info.type_name == "string" and info.choices:
        return {"choices": info.choices}
    return {"type": _reader(info), "metavar": _metavar(info)}


def _reader(info: Key) -> Callable[[str], object]:
    if info.type_name == "list of integer":
        return _integers
    if info.type_name.startswith("list"):
        return _words
    return {"integer": int, "number": float}.get(info.type_name, str)


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",")]


def _integers(text: str) -> list[int]:
    return [int(word) for word in _words(text)]


def _metavar(info: Key) -> str:
    if info.type_name.startswith("list"):
        return "A,B"
    return {"integer": "N", "number": "SECONDS"}.get(info.type_name, "TEXT")
