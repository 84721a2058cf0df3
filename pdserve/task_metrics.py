"""How many tasks an event loop has, for whoever looks for one that never ends."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from prometheus_client import Gauge

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

TASKS = "pdserve_asyncio_tasks"


def watch_tasks(registry: CollectorRegistry) -> None:
    """A gauge of the tasks that have not ended; to be read where the loop runs."""
    text = "Tasks of the process's event loop that have not ended."
    Gauge(TASKS, text, registry=registry).set_function(lambda: len(asyncio.all_tasks()))
