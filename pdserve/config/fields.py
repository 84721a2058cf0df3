"""Value types of configuration keys, the base class of sections, and checks that sections share."""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated, Literal, NoReturn

from msgspec import Meta, Struct

from pdserve.errors import ConfigError

DAY_S = 86400

Endpoint = Annotated[str, Meta(pattern="^(https?://.*)?$")]
LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]
Text = Annotated[str, Meta(min_length=1)]
Revision = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{0,63}\Z")]
Port = Annotated[int, Meta(ge=0, le=65535)]
Count = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
Amount = Annotated[float, Meta(ge=0)]
Seconds = Annotated[float, Meta(ge=0, le=DAY_S)]
Duration = Annotated[float, Meta(ge=0.001, le=DAY_S)]
Days = Annotated[float, Meta(ge=0.001, le=36500)]
Lease = Annotated[float, Meta(ge=0.1, le=3600)]
Bytes = Annotated[int, Meta(ge=1, le=1 << 40)]

# Prefixes of entries of `worker.routers` that are looked up.
DNS_ENTRY, FILE_ENTRY = "dns:", "file:"
# gRPC reads an address without a plain host in its own way, such as "ipv4:1:1".
_ADDRESS = re.compile(r"(?:[^:\[\]/\s]+|\[[0-9a-fA-F:.%]+\]):(\d{1,5})")


def about(text: str) -> Meta:
    """Return the description of a key, for `Annotated`. A line break in it is a space."""
    return Meta(description=" ".join(text.split()))


class Section(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base class of all sections. Each key has a description (`about`); a subsection without one
    is described by the first paragraph of its class."""


class _Invalid(ConfigError, ValueError):
    """A ConfigError that msgspec reports with the path of the section that raised it."""


def refuse(dotted: str, reason: str) -> NoReturn:
    """Raise ConfigError for a key or a command-line option."""
    raise _Invalid(f"{dotted}: {reason}" if dotted else reason, field=dotted)


def is_exposed(host: str) -> bool:
    """Return True if other machines can reach a server that listens at `host`."""
    try:
        return not ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host != "localhost"


def is_address(text: str) -> bool:
    """Return True for host:port."""
    found = _ADDRESS.fullmatch(text)
    return found is not None and 0 < int(found[1]) < 1 << 16


def check_exposed(*rules: tuple[str, object, str]) -> None:
    """Refuse `access.require_auth` if a rule is broken. A rule has a host, whether callers
    authenticate there, and the key to set if they do not."""
    broken = [x for x in rules if x[0] and not x[1] and is_exposed(x[0])]
    if broken:
        where = ", ".join(dict.fromkeys(host for host, _, _ in broken))
        keys = "; ".join(dict.fromkeys(key for _, _, key in broken))
        refuse("access.require_auth", f"other machines can reach {where}; set {keys}")
