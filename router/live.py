"""Changes of the configuration of a running router."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from pdserve.config import LIVE_KEYS, RouterConfig, refuse
from pdserve.observe.logs import set_level

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdserve.observe.audit import Caller
    from pdserve.security.browsers import BrowserGuard
    from pdserve.security.roles import Guard
    from router.api.shared import SharedParts
    from router.request_path import RequestPath

logger = logging.getLogger(__name__)
_S = TypeVar("_S", bound=Struct)


@dataclass(slots=True)
class LiveConfig:
    """The configuration in use, and the parts that apply its changes. `guard`: None if gRPC checks
    no roles."""

    config: RouterConfig
    path: RequestPath
    shared: SharedParts
    guard: Guard | None
    browsers: BrowserGuard

    def change(self, new: RouterConfig, caller: Caller) -> None:
        """Apply the keys of LIVE_KEYS. Raises ConfigError, without any
        change, for a change that needs a restart to be safe."""
        old = self.config
        with self.shared.audit.action(caller, "reload") as line:
            for key, before, after in (
                ("tenants", old.tenants, new.tenants),
                ("access.admin_keys", old.access.admin_keys, new.access.admin_keys),
            ):
                if bool(before) != bool(after):
                    reason = "the first entry, and the removal of the last one, need a restart"
                    refuse(f"router.{key}", reason)
            used = old
            for key in LIVE_KEYS:
                used = _with(used, key, attrgetter(key)(new))
            line["changed"] = list(_changed(old, used))
            line["added"], line["removed"] = _key_names(old, used), _key_names(used, old)
            self._use(used)
            later = list(_changed(used, new))
        logger.info("configuration: changed %s", ", ".join(line["changed"]) or "nothing")
        if later:
            logger.warning("these keys change with a restart: router.%s", ", router.".join(later))

    def _use(self, new: RouterConfig) -> None:
        self.config = new
        path, admin_keys = self.path, new.access.admin_keys
        self.shared.keys.use(new.tenants, admin_keys)
        self.shared.intake.residency.use(new.tenants)
        if self.guard is not None:
            self.guard.admin_keys = admin_keys
        self.browsers.use_origins(new.http.cors_origins)
        path.admission.tenants.use(new.tenants)
        path.admission.use_max_ttft(new.slo.ttft_s * new.slo.reject_factor)
        path.workers.billing.prices = new.prices
        path.metrics.slo = path.costs.slo = new.slo
        set_level(new.log.level)


def _with(section: _S, dotted: str, value: object) -> _S:
    """Return `section` with another value of one key."""
    name, _, rest = dotted.partition(".")
    return replace(section, **{name: _with(getattr(section, name), rest, value) if rest else value})


def _changed(old: Struct, new: Struct, at: str = "") -> Iterator[str]:
    """Yield the dotted keys whose values differ."""
    for name in old.__struct_fields__:
        before, after = getattr(old, name), getattr(new, name)
        if isinstance(before, Struct):
            yield from _changed(before, after, f"{at}{name}.")
        elif before != after:
            yield f"{at}{name}"


def _key_names(old: RouterConfig, new: RouterConfig) -> list[str]:
    """Return the API keys of `new` that `old` lacks, as owner and beginning of the hash."""
    return sorted(set(_named(new)) - set(_named(old)))


def _named(config: RouterConfig) -> Iterator[str]:
    owners: list[tuple[str, tuple[str, ...]]] = [("admin", config.access.admin_keys)]
    owners += [(f"tenant {x.name}", x.keys) for x in config.tenants]
    for owner, hashes in owners:
        for text in hashes:
            yield f"{owner}: {text[:19]}"
