"""The follower of a multi-node worker: it runs ranks of the model, without an engine or listener.

It corresponds to vLLM's headless mode (entrypoints/cli/serve.py).
"""

from __future__ import annotations

import logging
import signal
from multiprocessing.connection import wait
from typing import TYPE_CHECKING

from workers.vllm.start.settings import apply_environment

if TYPE_CHECKING:
    from types import FrameType

    from pdserve.process.child import Reports
    from workers.vllm.start.settings import VllmSettings

logger = logging.getLogger(__name__)


class _Signalled(BaseException):
    pass


def run_follower(settings: VllmSettings, head_timeout_s: float, reports: Reports) -> str:
    """Run the ranks of this node until the head ends them. Return "", or the failure of a rank.

    After a first signal, the head has `head_timeout_s` to drain, move its streams and end. A second
    signal ends the ranks at once, which ends the worker. Raises ConfigError and vLLM's errors.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _raise)
    nodes = settings.nodes
    executor = None
    try:
        apply_environment(settings)
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.executor.multiproc_executor import MultiprocExecutor

        from workers.vllm.start.args import make_config

        config, _ = make_config(settings, UsageContext.OPENAI_API_SERVER)
        reports.doing(f"joining {nodes.address}:{nodes.port}")
        executor = MultiprocExecutor(config, monitor_workers=False)
        ranks = [handle.proc for handle in executor.workers]
        logger.info("node %d of %d runs %d ranks", nodes.rank, nodes.count, len(ranks))
        reports.ready({"worker_id": "", "role": "", "address": "", "debug": ""})
        try:
            wait([rank.sentinel for rank in ranks])
        except _Signalled:
            wait([rank.sentinel for rank in ranks], head_timeout_s)
    except _Signalled:
        logger.info("this node ends before the head does")
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        if executor is not None:
            executor.shutdown()
    failed = [rank for rank in ranks if rank.exitcode] if executor is not None else []
    return f"{failed[0].name} ended with exit code {failed[0].exitcode}" if failed else ""


def _raise(_number: int, _frame: FrameType | None) -> None:
    raise _Signalled
