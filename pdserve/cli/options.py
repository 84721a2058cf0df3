"""Options that several commands share, and the connection to a service."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import re
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc.aio

from pdserve.config import (
    Config,
    TopologyConfig,
    all_keys,
    current_changes,
    load_config,
    read_yaml,
    refuse,
)
from pdserve.errors import Unavailable
from pdserve.net.rpc import Dialer, error_from_rpc, has_error
from pdserve.security.local import key_for
from pdserve.security.tls import tls_dialer
from pdserve.suggestions import did_you_mean, for_flags

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence

    from rich.table import Table

    from pdserve.config import Key

    Subparsers = argparse._SubParsersAction["CommandParser"]
    Handler = Callable[[argparse.Namespace], int | Coroutine[Any, Any, int]]
    Metadata = tuple[tuple[str, str], ...]

KEY_VARIABLE = "PDSERVE_API_KEY"
KEY_FILE_VARIABLE = "PDSERVE_API_KEY_FILE"
DEFAULT_URL = "http://127.0.0.1:8000"
DEFAULT_GRPC = "127.0.0.1:8001"
_TLS_OPTIONS = {
    "ca": ("FILE", "CAs of the service's certificate"),
    "cert": ("FILE", "client certificate"),
    "key": ("FILE", "private key of the client certificate"),
    "name": ("NAME", "name in the service's certificate, if it is not the host"),
}


class CommandParser(argparse.ArgumentParser):
    """An argument parser that can pass unknown words on to another program."""

    passes_on = False

    def __init__(self, **kwargs: Any) -> None:
        # An abbreviation may become ambiguous with a new option.
        super().__init__(**{**kwargs, "allow_abbrev": False})

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """With `passes_on`, put unknown words into `words`. Otherwise they are an error of this
        command, with a hint, because the parent parser does not know its options."""
        found, unknown = super().parse_known_args(args, namespace)
        if self.passes_on:
            found.words = unknown
        elif unknown:
            hints = for_flags(unknown, self._option_string_actions)
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hints}")
        return found, []

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            error.message += did_you_mean(str(value), map(str, action.choices or ()))
            raise


def add_command(
    commands: Subparsers, name: str, handler: Handler, summary: str, description: str = ""
) -> CommandParser:
    parser = commands.add_parser(
        name,
        help=summary,
        description=description or f"{summary.capitalize()}.",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=30, width=110),
    )
    parser.set_defaults(handler=handler)
    return parser


def add_seconds(
    parser: argparse._ActionsContainer,
    flag: str,
    default: float | None,
    text: str,
    *,
    or_none: bool = False,
) -> None:
    """Add an option that takes seconds above 0, or also 0 with `or_none`."""
    note = "" if default is None else " (default: %(default)g)"

    def seconds(text: str) -> float:
        value = float(text)
        if not 0 <= value < float("inf") or not (value or or_none):
            raise argparse.ArgumentTypeError(f"must be a number of seconds above 0, not {text}")
        return value

    parser.add_argument(flag, type=seconds, default=default, metavar="SECONDS", help=text + note)


def add_milliseconds(
    parser: argparse._ActionsContainer, flag: str, default: float, text: str
) -> None:
    """Add an option that takes milliseconds above 0, and has them as seconds."""

    def milliseconds(text: str) -> float:
        value = float(text)
        if not 0 < value < float("inf"):
            raise argparse.ArgumentTypeError(f"must be milliseconds above 0, not {text}")
        return value / 1e3

    note = f" (default: {default * 1e3:g})"
    parser.add_argument(flag, type=milliseconds, default=default, metavar="MS", help=text + note)


def add_config_options(
    parser: argparse.ArgumentParser, flags: Mapping[str, str], *, file: bool = True
) -> None:
    """Add `--config` (if there is a `file`), `--set` and `flags` (option to dotted key). An option
    that is not given leaves the file's value."""
    if file:
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
        default = ",".join(map(str, key.default)) if key.is_list else key.default
        note = f" (default: {default})" if default not in ("", None, False) else ""
        text = key.description.partition(". ")[0].removesuffix(".").replace("%", "%%")
        group.add_argument(flag, dest=dotted, **_value(key), help=text + note)


def _value(key: Key) -> dict[str, Any]:
    """Return the arguments of `add_argument` for the value of a key."""
    if key.kind is bool:
        return {"action": "store_const", "const": True}
    if key.is_list:
        convert = int if key.kind is int else str.strip
        return {"type": lambda text: [convert(x) for x in text.split(",")], "metavar": "A,B"}
    if key.choices:
        return {"choices": key.choices}
    if key.kind is int:
        return {"type": int, "metavar": "N"}
    if key.kind is float:
        return {"type": float, "metavar": "SECONDS" if key.dotted.endswith("_s") else "NUMBER"}
    kinds = {"file": "FILE", "dir": "DIR", "model": "MODEL"}
    return {"metavar": kinds.get(re.split(r"[._]", key.dotted)[-1], "TEXT")}


def config_from(args: argparse.Namespace) -> Config:
    """Return the configuration that the options set. Raises ConfigError."""
    changes = changes_from(args)
    return load_config(args.config, changes if args.config else aggregated_alone(changes))


def aggregated_alone(changes: dict[str, object]) -> dict[str, object]:
    """Return `changes`. If they set aggregated workers but neither prefill nor decode workers, add
    0 of both."""
    pools = ("up.prefill", "up.decode", "up.models")
    if not changes.get("up.aggregated.workers") or any(x.startswith(pools) for x in changes):
        return changes
    return {**changes, "up.prefill.workers": 0, "up.decode.workers": 0}


def changes_from(args: argparse.Namespace) -> dict[str, object]:
    """Return the dotted keys that the options set. Raises ConfigError."""
    changes: dict[str, object] = {}
    for text in args.set:
        dotted, equals, value = text.partition("=")
        if not equals or not dotted:
            refuse("--set", f"must be KEY=VALUE, not {text!r}")
        changes[dotted] = read_yaml(f"value: {value}", f"--set {dotted}")["value"]
    given = {name: x for name, x in vars(args).items() if "." in name and x is not None}
    return current_changes({**changes, **given})


def add_service_options(
    parser: argparse.ArgumentParser, *, several: bool = False, as_json: str = "print JSON"
) -> None:
    """Add `--grpc`, `--json` and the options of `add_dial_options`."""
    parser.add_argument(
        "--grpc",
        default=DEFAULT_GRPC,
        metavar="HOST:PORT,..." if several else "HOST:PORT",
        help="gRPC address of the router (default: %(default)s)",
    )
    if as_json:
        parser.add_argument("--json", action="store_true", help=as_json)
    add_dial_options(parser)


def add_dial_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for TLS and authentication."""
    group = parser.add_argument_group("authentication and TLS")
    text = f"API key, which other users of this machine can see (default: ${KEY_VARIABLE})"
    keys = group.add_mutually_exclusive_group()
    keys.add_argument("--api-key", metavar="KEY", help=text)
    file, text = os.environ.get(KEY_FILE_VARIABLE), "file with the API key"
    text = f"{text} (default: ${KEY_FILE_VARIABLE})"
    keys.add_argument("--api-key-file", metavar="FILE", default=file, help=text)
    group.add_argument(
        "--tls", action="store_true", help="use TLS; implied by the options that follow"
    )
    for name, (metavar, text) in _TLS_OPTIONS.items():
        variable = f"PDSERVE_TLS_{name.upper()}"
        default = os.environ.get(variable, "")
        note = f"{text} (default: ${variable})"
        group.add_argument(f"--tls-{name}", metavar=metavar, default=default, help=note)


def api_key_from(args: argparse.Namespace) -> str:
    """Return the API key, empty if there is none. Raises ConfigError for an unreadable file."""
    return _given_key(args) or os.environ.get(KEY_VARIABLE, "")


def _given_key(args: argparse.Namespace) -> str:
    if args.api_key is not None or not args.api_key_file:
        return args.api_key or ""
    try:
        # A file with several secrets is being rotated; the service accepts each of them.
        return next(iter(Path(args.api_key_file).read_text(encoding="utf-8").split()), "")
    except (OSError, UnicodeDecodeError) as error:
        refuse("--api-key-file", f"cannot read {args.api_key_file}: {error}")


def dialer_from(args: argparse.Namespace) -> Dialer:
    """Return the dialer of the service's gRPC API. Raises ConfigError."""
    token = api_key_from(args)
    if not (args.tls or any(getattr(args, f"tls_{name}") for name in _TLS_OPTIONS)):
        return Dialer(token=token)
    if bool(args.tls_cert) != bool(args.tls_key):
        given, missing = ("cert", "key") if args.tls_cert else ("key", "cert")
        refuse(f"--tls-{missing}", f"is required with --tls-{given}")
    return tls_dialer(
        ca_file=args.tls_ca,
        cert_file=args.tls_cert,
        key_file=args.tls_key,
        peer_name=args.tls_name,
        token=token,
    )


def admin_dialer_from(args: argparse.Namespace) -> Dialer:
    """Return the dialer for administrators of the service at `--grpc`. Without a given key it uses
    the key that `pdserve up` created for this user. Raises ConfigError."""
    key = _given_key(args) or key_for(args.grpc.partition(",")[0]) or api_key_from(args)
    return replace(dialer_from(args), token=key)


def http_tls_from(args: argparse.Namespace) -> ssl.SSLContext | bool:
    """Return the `ssl` argument of aiohttp. Raises ConfigError."""
    return (dialer_from(args).context if args.tls_ca or args.tls_cert else None) or True


@contextlib.asynccontextmanager
async def channel_to(args: argparse.Namespace) -> AsyncIterator[tuple[grpc.aio.Channel, Metadata]]:
    """Yield a channel to the router at `--grpc` and the metadata of its calls. Raises PdserveError
    for a failed call."""
    dialer = admin_dialer_from(args)
    async with dialer.open_channel(args.grpc) as channel:
        try:
            yield channel, dialer.metadata
        except grpc.aio.AioRpcError as error:
            found = error_from_rpc(error)
            if isinstance(found, Unavailable) and not has_error(error):
                raise Unavailable(f"no router at {args.grpc}: {found.message}") from error
            raise found from error


def place_of(topology: Mapping[str, str]) -> str:
    """Return the topology labels of a process as one word, the region first."""
    levels = TopologyConfig.__struct_fields__
    return "/".join(topology[level] for level in levels if level in topology)


def percent(share: float) -> str:
    """Return a share of 1 in percent, with as many digits as small shares need."""
    return f"{100 * share:.3g}%"


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


async def until_stopped(running: Coroutine[Any, Any, object]) -> None:
    """Run a coroutine until it ends or until SIGINT or SIGTERM cancels it."""
    task = asyncio.ensure_future(running)
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await task


def table_of(
    title: str,
    texts: Sequence[str],
    numbers: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    notes: str = "",
    caption: str = "",
) -> Table:
    """Return a table with columns of texts, of numbers, and `notes`. None is shown as "-"."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=title or None, caption=caption or None, box=None, pad_edge=False)
    table.title_justify = table.caption_justify = "left"
    for name in texts:
        width = max(len(name), 8 if name else 0)  # narrower columns break words
        table.add_column(name, overflow="fold", no_wrap=name == "worker", min_width=width)
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    if notes:
        table.add_column(notes, overflow="fold")
    for row in rows:
        table.add_row(*("-" if x is None else escape(str(x)) for x in row))
    return table
