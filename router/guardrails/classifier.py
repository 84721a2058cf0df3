"""A guard that compares texts with labelled examples, by the embeddings of a pooling worker."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from router.guardrails.examples import EmbeddedExamples
from router.guardrails.guard import PASSED, Checked, GuardVerdict

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from pdserve.config import GuardConfig
    from pdserve.model.tokenizer import Tokenizer
    from pdserve.types import ModelInfo
    from router.guardrails.examples import Embed, Vectors
    from router.guardrails.guard import GuardedText, Subject

_SPECIAL_TOKENS = 8  # room for those that the tokenizer adds to a text


class GuardClassifier:
    """A text matches if one of its parts does; a part has as many tokens as the model takes."""

    def __init__(
        self,
        config: GuardConfig,
        models: Callable[[], Mapping[str, ModelInfo]],
        tokenizer: Callable[[ModelInfo], Awaitable[Tokenizer]],
        embed: Embed,
    ) -> None:
        self._config, self._timeout_s = config.classifier, config.timeout_s
        self._verdict, self._replacement = GuardVerdict(config.verdict), config.replacement
        texts = (*self._config.flagged, *self._config.harmless)
        self._examples = EmbeddedExamples(self._config.model, texts, models, tokenizer, embed)
        self.close = self._examples.close

    async def check(self, subject: Subject, pieces: Sequence[GuardedText]) -> Checked:
        model, tokenizer = await self._examples.model()
        parts = [_parts(x.text, tokenizer, model.max_model_len) for x in pieces]
        if not (prompts := [y for x in parts for y in x]):
            return PASSED
        scores = await self._examples.scores(
            prompts, model, subject.request_id, subject.regions, self._timeout_s
        )
        matches = deque(self._matches(scores))
        found = [max([matches.popleft() for _ in x], default=False) for x in parts]
        if not any(found):
            return PASSED
        if self._verdict is not GuardVerdict.REDACT:
            return Checked(self._verdict)
        texts = [
            self._replacement if match else x.text for match, x in zip(found, pieces, strict=True)
        ]
        return Checked(self._verdict, texts)

    def _matches(self, scores: Vectors) -> list[bool]:
        """Return whether each row's nearest example is flagged, and near enough."""
        flagged, least = len(self._config.flagged), self._config.threshold
        return [bool(x.argmax() < flagged and x.max() >= least) for x in scores]


def _parts(text: str, tokenizer: Tokenizer, most: int) -> list[tuple[int, ...]]:
    """Return the token ids of all parts of a text."""
    tokens, _ = tokenizer.encode_within([text], most + 1)
    if len(tokens) <= most:
        return [tokens] if tokens else []
    plain = tokenizer.encode(text, add_special_tokens=False)
    size = max(1, most - _SPECIAL_TOKENS)
    parts = [tokenizer.decode(plain[i : i + size]) for i in range(0, len(plain), size)]
    return [tokenizer.encode_within([x], most)[0] for x in parts]
