"""Tokenizers of the served models: each is read once, off the event loop, when first needed."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from pdserve.errors import ConfigError, Unavailable
from pdserve.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.types import ModelInfo

logger = logging.getLogger(__name__)


class TokenizerCache:
    """State: one task a model directory, made by the first request that needs it and shared by
    those that come while it reads. A directory that could not be read is tried again."""

    def __init__(self, load: Callable[[Path], Tokenizer] = Tokenizer.load) -> None:
        self._load = load
        self._tasks: dict[str, asyncio.Task[Tokenizer]] = {}

    async def get(self, model: ModelInfo) -> Tokenizer:
        """Raises Unavailable where the model's directory cannot be read here."""
        task = self._tasks.get(model.path)
        if task is not None and task.done() and task.exception() is None:
            return task.result()
        if task is None:
            task = asyncio.create_task(asyncio.to_thread(self._load, Path(model.path)))
            self._tasks[model.path] = task
        try:
            # A client that goes away must not take the tokenizer from the others that wait.
            return await asyncio.shield(task)
        except ConfigError as error:
            if self._tasks.get(model.path) is task:
                del self._tasks[model.path]
            logger.error("tokenizer of model %s: %s", model.name, error)
            raise Unavailable(
                f"the router cannot read the tokenizer of model {model.name}"
            ) from error
