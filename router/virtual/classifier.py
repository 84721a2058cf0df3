"""Labels requests by their last user message, with a pooling worker: the label of the nearest
example."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from pdserve.config.virtual_models import MAX_EXAMPLE_CHARS
from pdserve.errors import PdserveError
from pdserve.model.tokenizer import Conversation
from router.guardrails.examples import EmbeddedExamples

if TYPE_CHECKING:
    from pdserve.config import ClassifierConfig
    from pdserve.types import Regions
    from router.attempt.answer import Embeds
    from router.intake.intake import Intake, ReadRequest

logger = logging.getLogger(__name__)


class ModelClassifier:
    """Labels messages."""

    def __init__(self, config: ClassifierConfig, embedder: Embeds, intake: Intake) -> None:
        self._config = config
        self._labels = [label for label, texts in config.examples.items() for _ in texts]
        texts = [text for each in config.examples.values() for text in each]
        self._examples = EmbeddedExamples(
            config.model, texts, intake.models.models, intake.tokenizer, embedder.embed
        )
        self.close = self._examples.close

    async def label(self, text: str, request_id: str, regions: Regions) -> str:
        """Return the label of a message, "" for none: nothing is similar, or no embedding was there
        in time."""
        limit_s = self._config.timeout_s
        try:
            async with asyncio.timeout(limit_s):
                model, tokenizer = await self._examples.model()
                tokens, _ = tokenizer.encode_within([text[:MAX_EXAMPLE_CHARS]], model.max_model_len)
                if not tokens:
                    return ""
                scores = await self._examples.scores([tokens], model, request_id, regions, limit_s)
        except TimeoutError:
            logger.info("request %s has no label: the classifier is late", request_id)
            return ""
        except PdserveError as error:
            logger.info("request %s has no label: %s", request_id, error.message)
            return ""
        best = int(scores[0].argmax())
        return self._labels[best] if scores[0][best] >= self._config.min_similarity else ""


def last_message(read: ReadRequest[Any]) -> str:
    """Return the text of the last user message of a request, "" if there is none."""
    prompt = read.parsed[0].prompt
    if read.source is None or not read.source.has_prompt:
        return ""
    if not isinstance(prompt, Conversation):
        return prompt if isinstance(prompt, str) else ""
    found = next((x for x in reversed(prompt.messages) if x.role == "user"), None)
    if found is None:
        return ""
    return found.content or "\n".join(x for x in found.parts if isinstance(x, str))
