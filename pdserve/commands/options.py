"""Options that stand for configuration keys; help, type and default come from the schema."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from pdserve.config import Config, load_config
from pdserve.config_schema import keys, read_yaml, refuse, sections

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from pdserve.config_schema import KeyInfo

Subparsers = argparse._SubParsersAction  # argparse has no public name for it

KEY_VARIABLE = "PDSERVE_API_KEY"
DEFAULT_URL = "http://127.0.0.1:8000"
DEFAULT_GRPC = "127.0.0.1:8001"


def all_keys(cls: type[object] = Config, at: str = "") -> Iterator[tuple[str, KeyInfo]]:
    """Every dotted key of the configuration."""
    for info in keys(cls):
        yield f"{at}{info.name}", info
    for name, nested, _ in sections(cls):
        yield from all_keys(nested, f"{at}{name}.")


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
    known = dict(all_keys())
    for flag, dotted in flags.items():
        info = known[dotted]
        default = ",".join(map(str, x)) if isinstance(x := info.default, list) else info.default
        note = f" (default: {default})" if default not in ("", None) else ""
        parser.add_argument(
            flag,
            dest=dotted,
            type=_reader(info),
            choices=info.choices if info.type_name == "string" and info.choices else None,
            metavar=None if info.type_name == "string" and info.choices else _metavar(info),
            help=info.doc.removesuffix(".").replace("%", "%%") + note,
        )


def add_key_option(parser: argparse.ArgumentParser) -> None:
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


def _reader(info: KeyInfo) -> Callable[[str], object]:
    if info.type_name == "list of integer":
        return _integers
    if info.type_name.startswith("list"):
        return _words
    return {"integer": int, "number": float}.get(info.type_name, str)


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",")]


def _integers(text: str) -> list[int]:
    return [int(word) for word in _words(text)]


def _metavar(info: KeyInfo) -> str:
    if info.type_name.startswith("list"):
        return "A,B"
    return {"integer": "N", "number": "SECONDS"}.get(info.type_name, "TEXT")
