"""Rendering of prompts with images beside the engine: chat template, tokenizer, image processor.

Native code reads untrusted images, and a small file can expand to gigabytes. Each prompt is
therefore rendered in a disposable process (fork_pool.py, render_fork.py).
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
from collections import OrderedDict
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from pdserve import wire
from pdserve.errors import InvalidRequest, Overloaded, from_info
from pdserve.net.framing import MAX_FRAME_BYTES
from pdserve.process.child_pool import ChildFailed
from pdserve.v1 import common_pb2 as c
from pdserve.v1 import worker_pb2 as w
from workers.vllm.fork_pool import ForkPool

if TYPE_CHECKING:
    from workers.vllm.images.renderer import PromptRenderer

logger = logging.getLogger(__name__)

# Limits per prompt. CPU time, not wall time, so that a busy machine refuses nothing.
CPU_S = 20
MEMORY_BYTES = 2 << 30
# The first byte of a fork's answer.
RENDERED, REFUSED = b"\0", b"\1"
_RENDER_S = 60.0
# A quarter of a frame is left for the rest of the request.
MAX_RENDERED_BYTES = MAX_FRAME_BYTES * 3 // 4
_MAX_AT_ONCE = 2
_MAX_WAITING = 32
_CACHE_BYTES = 256 << 20

# Set in the template process and its forks only.
renderer: PromptRenderer


def preload(config_path: str) -> None:
    """Load everything that forks need. `config_path` has the engine's pickled VllmConfig."""
    global renderer
    # Use no threads: a fork does not inherit its parent's threads.
    os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
    from workers.vllm.images.renderer import PromptRenderer

    renderer = PromptRenderer(pickle.loads(Path(config_path).read_bytes()))


class RenderPool:
    """State: the forks, the number of prompts that wait or are rendered, and rendered prompts by
    the digest of their request, the least recently used first."""

    def __init__(self, config: bytes) -> None:
        """`config` is the engine's pickled VllmConfig. The forks' template starts now."""
        self._forks = ForkPool(
            f"{__name__}:preload",
            "workers.vllm.images.render_fork",
            config,
            at_once=_MAX_AT_ONCE,
            timeout_s=_RENDER_S,
            task="read images",
        )
        self._forks.start()
        self._open = 0
        self._cache: OrderedDict[bytes, bytes] = OrderedDict()
        self._cached_bytes = 0

    async def render(self, request: w.RenderRequest) -> w.RenderResponse:
        """Render a prompt. Raises InvalidRequest, Overloaded, and Unavailable if no process
        starts."""
        data = request.SerializeToString(deterministic=True)
        digest = sha256(data).digest()
        rendered = self._cache.get(digest)
        if rendered is None:
            if self._open >= _MAX_WAITING:
                text = f"{self._open} prompts with images wait on this worker"
                raise Overloaded(text, retry_after_s=1.0)
            self._open += 1
            try:
                rendered = await self._in_fork(data)
            finally:
                self._open -= 1
            self._keep(digest, rendered)
        else:
            self._cache.move_to_end(digest)
        return w.RenderResponse.FromString(rendered)

    async def _in_fork(self, data: bytes) -> bytes:
        try:
            answer = await self._forks.run(data)
        except ChildFailed as error:
            logger.warning("images ended the process that reads them: exit code %d", error.code)
            text = f"the images crash their reader, or take over {MEMORY_BYTES >> 30} GiB of memory"
            if error.code == -signal.SIGXCPU:
                text = f"the images take over {CPU_S} s of CPU time to read"
            raise InvalidRequest(text, field="images") from None
        kind, body = answer[:1], answer[1:]
        if kind == REFUSED:
            raise from_info(wire.error_from_pb(c.Error.FromString(body)))
        return body

    def _keep(self, digest: bytes, rendered: bytes) -> None:
        self._cached_bytes += len(rendered) - len(self._cache.get(digest, b""))
        self._cache[digest] = rendered
        while self._cached_bytes > _CACHE_BYTES:
            _, gone = self._cache.popitem(last=False)
            self._cached_bytes -= len(gone)

    def close(self) -> None:
        """End all processes. Idempotent."""
        self._forks.close()
