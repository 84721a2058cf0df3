"""Image files for tests."""

from __future__ import annotations

import struct


def png(width: int, height: int) -> bytes:
    """Return the header of a PNG file: enough for whoever does not decode it."""
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sII", 13, b"IHDR", width, height)
