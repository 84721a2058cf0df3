"""Bodies and answers of /tokenize and /detokenize, with vLLM's fields."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from pdserve.model.tokenizer import Conversation
from router.api.dialects.conversation import (
    Begins,
    Continues,
    Effort,
    Message,
    Variables,
    conversation,
)
from router.api.dialects.fields import (
    MAX_MESSAGES,
    Body,
    Known,
    ModelName,
    TokenIds,
    encode,
    knows,
    refuse,
)
from router.api.preprocess import check_ids, encode_prompt, prompt_with_images

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.model.token_cache import CachedParts
    from pdserve.model.tokenizer import Tokenizer
    from pdserve.types import ModelInfo
    from router.operations.rendering import ImagePrompt


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
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: bool | None = None
    chat_template_kwargs: Variables = None
    reasoning_effort: Effort = None
    add_generation_prompt: Begins = None
    continue_final_message: Continues = None

    def content(self) -> str | Conversation:
        """Return the text or the conversation. Raises InvalidRequest naming the field."""
        if self.prompt is None and not self.messages:
            refuse("prompt", "or 'messages' is required")
        if self.prompt is not None and self.messages:
            refuse("messages", "cannot be combined with prompt")
        return conversation(self) if self.prompt is None else self.prompt

    def answer(
        self, tokenizer: Tokenizer, model: ModelInfo, parts: CachedParts
    ) -> bytes | ImagePrompt:
        """Return the JSON of the answer, or a prompt that a worker must render for `counted`.
        Raises InvalidRequest naming the field."""
        field, add = "messages" if self.prompt is None else "prompt", self.add_special_tokens
        prompt = self.content()
        if isinstance(prompt, Conversation) and prompt.images:
            return prompt_with_images(prompt, tokenizer, model, add, field=field)
        tokens = encode_prompt(prompt, tokenizer, model, parts, add, field=field)
        return self.counted(tokens, model)

    @staticmethod
    def counted(tokens: Sequence[int], model: ModelInfo) -> bytes:
        """Return the JSON of the answer for a prompt of these tokens."""
        found = {"count": len(tokens), "max_model_len": model.max_model_len}
        return encode({**found, "tokens": tuple(tokens), "token_strs": None})


class DetokenizeRequest(Body, kw_only=True):
    """Body of POST /detokenize."""

    model: ModelName = None
    tokens: TokenIds

    def answer(self, tokenizer: Tokenizer, model: ModelInfo, _parts: CachedParts) -> bytes:
        """Return the JSON of the answer. Raises InvalidRequest naming the field."""
        check_ids(self.tokens, model, field="tokens")
        return encode({"prompt": tokenizer.decode(self.tokens)})
