"""What a training text is: documents, chat messages, and the special tokens that mark them."""

from dataclasses import dataclass
from typing import Final, Literal

Role = Literal["system", "user", "assistant"]

END: Final = "<|end|>"
"""Ends a message of a chat and a text of prose: the end-of-sequence token."""
PAD: Final = "<|pad|>"
ROLE_TOKENS: Final[dict[Role, str]] = {
    "system": "<|system|>",
    "user": "<|user|>",
    "assistant": "<|assistant|>",
}
SPECIAL_TOKENS: Final = (PAD, END, *ROLE_TOKENS.values())

CHAT_TEMPLATE: Final = (
    "{%- for message in messages -%}"
    "{%- if message['role'] not in ('system', 'user', 'assistant') -%}"
    "{{- raise_exception('role must be system, user or assistant') -}}"
    "{%- endif -%}"
    "{{- '<|' + message['role'] + '|>' + message['content'] + '<|end|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)
"""The Jinja template that renders messages just as `Document.spans` does."""


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a chat."""

    role: Role
    text: str


@dataclass(frozen=True, slots=True)
class Span:
    """A piece of rendered text, and whether the model has to learn to write it."""

    text: str
    learned: bool


@dataclass(frozen=True, slots=True)
class Document:
    """One training text: a chat if it has messages, else prose."""

    messages: tuple[Message, ...] = ()
    prose: str = ""

    def spans(self) -> tuple[Span, ...]:
        """The document in the order of its text; each span is tokenized by itself."""
        if not self.messages:
            return (Span(self.prose + END, learned=True),)
        out: list[Span] = []
        for message in self.messages:
            out.append(Span(ROLE_TOKENS[message.role], learned=False))
            out.append(Span(message.text + END, learned=message.role == "assistant"))
        return tuple(out)

    def text(self) -> str:
        """The whole document as one string."""
        return "".join(span.text for span in self.spans())


def chat(question: str, answer: str) -> Document:
    """A chat of one question and one answer."""
    return Document((Message("user", question), Message("assistant", answer)))
