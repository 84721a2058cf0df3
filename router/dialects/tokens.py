"""Bodies and answers of /tokenize and /detokenize, with vLLM's fields."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from router.dialects.conversation import (
    Begins,
    Continues,
    Effort,
    Message,
    Variables,
    conversation,
)
from router.dialects.fields import (
    MAX_MESSAGES,
    Body,
    InferenceGeo,
    Known,
    ModelName,
    TokenIds,
    encode,
    knows,
    refuse,
)
from router.dialects.parsed_request import PromptText

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.types import ModelInfo


@knows(
    {
        "chat_template": Known((), "the model's own is used"),
        "media_io_kwargs": Known(({},)),
        "mm_processor_kwargs": Known(({},)),
        "return_token_strs": Known((False,), "use /detokenize"),
        "tools": Known(([],)),
    }
)
class TokenizeRequest(Body, kw_only=True):
    """Body of POST /tokenize: a text, or a conversation."""

    model: ModelName = None
    inference_geo: InferenceGeo = None
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: bool | None = None
    chat_template_kwargs: Variables = None
    reasoning_effort: Effort = None
    add_generation_prompt: Begins = None
    continue_final_message: Continues = None

    def content(self) -> PromptText:
        """Return the text or the conversation. Raises InvalidRequest naming the field."""
        if self.prompt is None and not self.messages:
            refuse("prompt", "or 'messages' is required")
        if self.prompt is not None and self.messages:
            refuse("messages", "cannot be combined with prompt")
        if self.prompt is None:
            return PromptText(conversation(self), "messages", self.add_special_tokens)
        return PromptText(self.prompt, "prompt", self.add_special_tokens)

    @staticmethod
    def counted(tokens: Sequence[int], model: ModelInfo) -> bytes:
        """Return the JSON of the answer for a prompt of these tokens."""
        found = {"count": len(tokens), "max_model_len": model.max_model_len}
        return encode({**found, "tokens": tuple(tokens), "token_strs": None})


class DetokenizeRequest(Body, kw_only=True):
    """Body of POST /detokenize."""

    model: ModelName = None
    inference_geo: InferenceGeo = None
    tokens: TokenIds
