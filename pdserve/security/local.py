"""Credentials that `pdserve up` creates if none are configured, and their discovery by commands of
the same user. Secrets are in files that only this user can read, and are never printed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from pdserve.security.keys import new_key

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdserve.config import AccessConfig, RouterAccessConfig

# File names by key of AccessConfig.
_FILES = {"worker_token_file": "worker.token", "admin_key_file": "admin.key"}


def new_credentials(router: RouterAccessConfig, worker: AccessConfig) -> dict[str, str]:
    """Return new secrets by key of AccessConfig, for keys that neither has. Return an empty dict if
    roles are configured, or `open_control` disables them."""
    if router.asks_for_roles or worker.asks_for_roles or router.open_control:
        return {}
    return {key: new_key() for key in _FILES if key not in shared_files(router, worker)}


def shared_files(router: RouterAccessConfig, worker: AccessConfig) -> dict[str, str]:
    """Return the files that either configuration names, by key. Within one service they apply to
    both."""
    pairs = {key: (getattr(router, key), getattr(worker, key)) for key in _FILES}
    return {key: one or other for key, (one, other) in pairs.items() if bool(one) != bool(other)}


def write_credentials(directory: Path, secrets: Mapping[str, str]) -> dict[str, str]:
    """Write each secret into a file of `directory`. Return the paths by key of AccessConfig."""
    files = {key: directory.resolve() / _FILES[key] for key in secrets}
    for key, path in files.items():
        write_private(path, secrets[key] + "\n")
    return {key: str(path) for key, path in files.items()}


def admin_key(directory: Path) -> str:
    """Return the administrator's key in the run directory of a `pdserve up`, or "" if there is
    none."""
    return _read(directory / _FILES["admin_key_file"])


def write_private(path: Path, content: str | bytes) -> None:
    """Replace a file, at once, with a new one that only this user can read. The file is created
    with these permissions, so its content is never readable for others."""
    new = path.with_name(f"{path.name}.new")
    new.unlink(missing_ok=True)
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
    new.replace(path)


def announce(address: str, key: str) -> None:
    """Store the administrator's key of the router at `address` where commands of this user find
    it. Raises OSError or RuntimeError if this user has no home directory."""
    path = _announced(address)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_private(path, key + "\n")


def withdraw(address: str) -> None:
    """Undo `announce`."""
    try:
        _announced(address).unlink(missing_ok=True)
    except (OSError, RuntimeError):
        return  # announce() failed as well, so there is nothing to remove


def key_for(address: str) -> str:
    """Return the announced key of the router at `address`, or "" if there is none."""
    try:
        return _read(_announced(address))
    except RuntimeError:
        return ""


def _announced(address: str) -> Path:
    host, _, port = address.rpartition(":")
    name = f"{'127.0.0.1' if host == 'localhost' else host}:{port}".replace("/", "_")
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "pdserve" / name


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
