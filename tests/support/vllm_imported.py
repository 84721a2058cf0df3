"""What the parent of all engines of a test run imports."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from workers.vllm.preload import preload as preload_worker

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


def preload() -> None:
    """Import vLLM as `pdserve up` does. Engines then look at the class of a model in their own
    process. vLLM does so in a new one, which imports vLLM again, unless its cache knows the class,
    because a look could initialize CUDA."""
    preload_worker()
    from vllm.model_executor.models import registry

    def run_here(function: Callable[[], T]) -> T:
        return function()

    registry._run_in_subprocess = run_here
