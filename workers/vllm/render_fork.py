"""A disposable process that renders one prompt with images: see render_pool.py.

    python -m workers.vllm.render_fork FD

It is forked from a process that ran `render_pool.preload`. It reads a RenderRequest from the socket
FD and sends RENDERED with a RenderResponse, or REFUSED with an Error.
"""

from __future__ import annotations

import logging
import socket
import sys

from pdserve import wire
from pdserve.errors import InvalidRequest, PdserveError
from pdserve.process.child import die_with
from pdserve.v1 import worker_pb2 as w
from workers.vllm import render_pool
from workers.vllm.fork_pool import limit, send
from workers.vllm.render_pool import CPU_S, MAX_RENDERED_BYTES, MEMORY_BYTES, REFUSED, RENDERED

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
    die_with(0)
    logging.disable()  # the client gets vLLM's message
    with socket.socket(fileno=int(sys.argv[1])) as sock, sock.makefile("rb") as file:
        request = w.RenderRequest.FromString(file.read())
        limit(MEMORY_BYTES, CPU_S)
        send(sock, rendered(request))


main()
