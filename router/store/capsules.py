"""Capsules in a folder, which routers of one region may share. All methods block."""

from __future__ import annotations

import hashlib
import logging
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pdserve.errors import ConfigError, InvalidRequest
from pdserve.observe.capsules import header_of
from pdserve.security.local import write_private

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.config import CapsulesConfig
    from pdserve.observe.capsules import CapsuleHeader

logger = logging.getLogger(__name__)

_SUFFIX = ".capsule"
_HEADER_BYTES = 1 << 14
_DAY_S = 86_400.0


class StoredCapsule(NamedTuple):
    header: CapsuleHeader
    size: int
    path: Path


class CapsuleStore:
    """A file is named for the end, the tenant and the id of its request. So limits are kept without
    reading files, and a later capsule of the same request replaces it. `unix_time`: the clock."""

    def __init__(self, config: CapsulesConfig, unix_time: Callable[[], float] = time.time) -> None:
        """Raises ConfigError if the folder cannot be used."""
        self._config, self._folder, self._now = config, Path(config.directory), unix_time
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._files()
        except OSError as error:
            text = f"cannot use {self._folder}: {error.strerror}"
            raise ConfigError(text, field="router.capsules.directory") from error

    def keep(self, header: CapsuleHeader, data: bytes) -> None:
        """Write a capsule, and delete what exceeds the limits. Raises OSError."""
        parts = f"{int(header.created * 1000):013}", _digest(header.tenant)
        name = ".".join((*parts, _digest(header.request_id)))
        write_private(self._folder / f"{name}{_SUFFIX}", data)
        self.prune()

    def prune(self) -> None:
        """Delete the oldest capsules beyond the limits."""
        config, size, by_tenant = self._config, 0, Counter[str]()
        oldest = (self._now() - config.days * _DAY_S) * 1000
        for number, path in enumerate(self._files()):
            created, tenant = path.name.split(".")[:2]
            by_tenant[tenant] += 1
            try:
                size += path.stat().st_size
                if (
                    number >= config.max_capsules
                    or by_tenant[tenant] > config.max_capsules_per_tenant
                    or size > config.max_mib << 20
                    or int(created) < oldest
                ):
                    size -= path.stat().st_size
                    path.unlink()
            except FileNotFoundError:
                continue  # another router deleted it

    def listed(self) -> list[StoredCapsule]:
        """Return all capsules, newest first."""
        found = []
        for path in self._files():
            try:
                with path.open("rb") as file:
                    header = header_of(file.read(_HEADER_BYTES))
                found.append(StoredCapsule(header, path.stat().st_size, path))
            except (OSError, InvalidRequest) as error:
                logger.warning("cannot read %s: %s", path, error)
        return found

    def _files(self) -> list[Path]:
        """Return the files, newest first. Files of others are left alone."""
        found = [x for x in self._folder.iterdir() if x.suffix == _SUFFIX]
        ours = [x for x in found if len(y := x.name.split(".")) == 4 and y[0].isdecimal()]
        return sorted(ours, reverse=True)


def _digest(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:16]
