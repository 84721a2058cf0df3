"""The secret that workers and routers may share."""

from __future__ import annotations

from pdserve.access.certificates import read
from pdserve.config import refuse

MIN_CHARS = 32


def read_token(path: str, at: str) -> str:
    """The secret in a file, without the line's end. Raises ConfigError naming the key `at`, and
    never says what is in the file."""
    try:
        token = read(path, at).decode("ascii").strip()
    except UnicodeDecodeError:
        token = ""
    if len(token) < MIN_CHARS or not token.isprintable() or " " in token:
        refuse(at, f"{path} must hold one line of {MIN_CHARS} or more printable characters")
    return token
