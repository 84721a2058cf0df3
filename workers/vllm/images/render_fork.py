"""A disposable process that renders one prompt with images: see render_pool.py.

It is forked from a process that ran `render_pool.preload`. It replies to a RenderRequest with
RENDERED and a RenderResponse, or REFUSED and an Error.
"""

from __future__ import annotations

import logging
from argparse import ArgumentParser

from pdserve import wire
from pdserve.errors import InvalidRequest, PdserveError
from pdserve.process.child_pool import calls, connected, limit, reply
from pdserve.v1 import worker_pb2 as w
from workers.vllm.fork_pool import STACK_BYTES
from workers.vllm.images import render_pool
from workers.vllm.images.render_pool import (
    CPU_S,
    MAX_RENDERED_BYTES,
    MEMORY_BYTES,
    REFUSED,
    RENDERED,
)

_MAX_REASON = 1000  # it may repeat the prompt


def rendered(request: w.RenderRequest) -> bytes:
    """Return the answer to `request`."""
    try:
        body = render_pool.renderer.render(request).SerializeToString()
        if len(body) > MAX_RENDERED_BYTES:
            text = f"the processed images have {len(body)} bytes; at most {MAX_RENDERED_BYTES}"
            raise InvalidRequest(text, field="images")
    except PdserveError as error:
        error.message = error.message[:_MAX_REASON]
        return REFUSED + wire.error_to_pb(error).SerializeToString()
    except MemoryError:
        text = f"the images take over {MEMORY_BYTES >> 30} GiB of memory to read"
        return REFUSED + wire.error_to_pb(InvalidRequest(text, field="images")).SerializeToString()
    return RENDERED + body


def main() -> None:
    logging.disable()  # the client gets vLLM's message
    _, sock = connected(ArgumentParser())
    request = w.RenderRequest.FromString(next(calls(sock)))
    limit(MEMORY_BYTES, CPU_S, STACK_BYTES)
    reply(sock, rendered(request))


main()
