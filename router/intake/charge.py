"""Estimates the images in an unread body: they are charged less than text."""

from __future__ import annotations

import re

# More images than any model takes; they bound the search for the images of a body.
_MOST_COUNTED = 64
# Before the data of an image in Messages' blocks, after "base64".
_BLOCK = re.compile(rb'"[^{}"]*"media_type"\s*:\s*"[\w/.+-]*"\s*,\s*"data"\s*:\s*"', re.ASCII)


def image_bytes(body: bytes) -> int:
    """Return about how many bytes of a JSON body are images in base64, without reading the body.
    Text that looks like base64 counts as an image, which lowers only the charge of the unread
    body."""
    found = end = 0
    for _ in range(_MOST_COUNTED):
        at = body.find(b"base64", end)
        if at < 0:
            break
        start = at + len(b"base64,")
        if body[start - 1 : start] != b",":
            block = _BLOCK.match(body, start - 1, start + 256)
            if block is None:
                end = start
                continue
            start = block.end()
        end = body.find(b'"', start)
        if end < 0:
            break
        found += end - start
    return found
