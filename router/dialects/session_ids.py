"""The session that a request names: one conversation of a client, such as the turns of an agent.

Clients name it in different places. A header (router/api/generation.py) wins over the body.
"""

from __future__ import annotations

import re
from typing import Any

from pdserve.errors import InvalidRequest

MAX_SESSION_ID = 256  # characters
# Claude Code puts it into `metadata.user_id`: as `user_…_session_UUID`, or in a JSON object.
_IN_USER_ID = re.compile(r'(?:_session_|"session_id": ?")([\w-]{1,64})', re.ASCII)


def check_session_id(given: str, *, field: str) -> str:
    """Return the id. Raises InvalidRequest naming the field if it is too long, or has characters
    that cannot be shown."""
    if len(given) > MAX_SESSION_ID or not given.isprintable():
        text = f"'{field}' must be at most {MAX_SESSION_ID} printable characters"
        raise InvalidRequest(text, field=field)
    return given


def session_of_metadata(metadata: Any) -> str:
    """Return the session in the `metadata` of Anthropic's API, or ""."""
    user = metadata.get("user_id") if isinstance(metadata, dict) else None
    found = _IN_USER_ID.search(user) if isinstance(user, str) else None
    return "" if found is None else found[1]
