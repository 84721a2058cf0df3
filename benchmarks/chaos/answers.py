"""What became of a request, and how it differs from what it should have been."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Ending = Literal["open", "ok", "failed", "aborted"]
_LOGPROB_TOLERANCE = 1e-3


@dataclass(slots=True)
class Choice:
    """One answer as far as it came. HTTP tells no token ids; ``count`` is its usage's then."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish: str = ""
    logprobs: list[tuple[int, float]] = field(default_factory=list)


@dataclass(slots=True)
class Outcome:
    """One request so far; times in seconds on the monotonic clock, ``pause_s`` the longest wait for
    a next piece. ``completion_tokens`` is what the service counted, ``code`` its own name for the
    error that it ended with, "" where it gave none."""

    number: int
    sent_s: float
    ending: Ending = "open"
    error: str = ""
    code: str = ""
    ended_s: float = 0.0
    heard_s: float = 0.0
    pause_s: float = 0.0
    pieces: int = 0
    completion_tokens: int = 0
    fallbacks: tuple[str, ...] = ()
    choices: dict[int, Choice] = field(default_factory=dict)

    def hear(self, now: float) -> None:
        """A piece came."""
        self.pause_s = max(self.pause_s, now - (self.heard_s or self.sent_s))
        self.heard_s = now
        self.pieces += 1

    def end(self, ending: Ending, now: float, error: str = "", code: str = "") -> None:
        """No more will come."""
        self.ending, self.error, self.code, self.ended_s = ending, error, code, now
        self.pause_s = max(self.pause_s, now - (self.heard_s or self.sent_s))

    def choice(self, index: int) -> Choice:
        """The answer of an index, new if need be."""
        return self.choices.setdefault(index, Choice())


def wrong_tokens(got: Outcome, expected: Outcome) -> int:
    """In how many tokens (or, where only text is known, answers) it differs; of one that did not
    end well, in what came of it."""
    wrong = 0
    is_whole = got.ending == "ok"
    for index, want in expected.choices.items():
        wrong += _wrong_in(got.choices.get(index, Choice()), want, is_whole=is_whole)
    wrong += len(got.choices.keys() - expected.choices.keys())
    if is_whole:
        wrong += abs(got.completion_tokens - expected.completion_tokens)
    return wrong


def _wrong_in(got: Choice, want: Choice, *, is_whole: bool) -> int:
    pairs = zip(got.token_ids, want.token_ids, strict=False)
    wrong = sum(a != b for a, b in pairs)
    wrong += max(0, len(got.token_ids) - len(want.token_ids))
    for (a, x), (b, y) in zip(got.logprobs, want.logprobs, strict=False):
        wrong += a != b or abs(x - y) > _LOGPROB_TOLERANCE
    if not is_whole:
        return wrong + (not wrong and not want.text.startswith(got.text))
    wrong += max(0, len(want.token_ids) - len(got.token_ids))
    wrong += len(got.logprobs) != len(want.logprobs)
    return wrong + (not wrong and (got.text, got.finish) != (want.text, want.finish))
