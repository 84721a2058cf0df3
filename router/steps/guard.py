"""Has guards check answers before they leave. It stands outside of parsing, so that it sees text,
reasoning and the arguments of tool calls apart.

Each guard is a gate in the way of each answer: it holds back deltas until their text is decided. A
guard of patterns holds only what may be the beginning of a match. A service or classifier gets
sentences, one call at a time; while it is slow, the next call has all sentences that wait.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct, structs

from pdserve.errors import DeadlineExceeded, InvalidRequest, PdserveError
from pdserve.types import FinishReason
from router.attempt.answer import AnswerDelta, ParsedDelta, pieces
from router.guardrails.guard import GuardedText, GuardPlace, GuardVerdict, Subject

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.types import PositionLogprobs
    from router.attempt.answer import Out
    from router.guardrails.guard import Guardrail, Guards
    from router.walk import Answered, Proceed, Walk

# A sentence ends before white space, so that 3.5 and www.example.com do not end one.
_SENTENCE_END = re.compile(r"[.!?。！？]+[\"')\]]*\s|\n")


class GuardStep:
    """Raises Unavailable if a guard fails closed, and InvalidRequest for routed experts."""

    def __init__(self, guards: Guards) -> None:
        self._guards = guards

    async def __call__(self, walk: Walk, proceed: Proceed) -> Answered:
        request = walk.request
        names = {request.model, request.served_name}
        guards = self._guards.of(GuardPlace.ANSWER, request.tenant, names)
        # The router that the client called checks what it forwards.
        if request.from_region or not guards:
            return await proceed(walk)
        if request.sampling.routed_experts:  # they would tell of tokens that are held or redacted
            text = "'routed_experts' cannot be combined with a guard that checks answers"
            raise InvalidRequest(text, field="routed_experts")
        answers = _GuardedAnswers(walk, guards)
        try:
            done = await proceed(structs.replace(walk, out=answers))
            async with asyncio.timeout_at(request.deadline):
                await answers.exit.ended
        except TimeoutError:
            raise DeadlineExceeded("the deadline passed while guards checked the answer") from None
        except PdserveError:
            if answers.exit.error is not None:  # it caused the cancellation that `proceed` raised
                raise answers.exit.error from None
            raise
        finally:
            answers.close()
        for answer in done.answers:
            if answers.is_refused(answer.index):
                answer.finish_reason = FinishReason.CONTENT_FILTER.value
        return done


class _Exit:
    """Where all answers to one request leave. `ended` completes with the last one, or fails with
    `error`. `reads`: the client keeps up. State: the number of unfinished answers; the very last
    delta, which waits until all others have left."""

    def __init__(self, out: Out, answers: int) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.error: PdserveError | None = None
        self.reads = True
        self._out, self._unfinished = out, answers
        self._last: AnswerDelta | None = None

    def write(self, delta: AnswerDelta) -> None:
        if delta.finish_reason is not None:
            self._unfinished -= 1
        if delta.usage is not None:
            self._last = delta
        else:
            self.reads = self._out.write(delta) and self.reads
        if not self._unfinished and not self.ended.done():
            if self._last is not None:
                self._out.write(self._last)
            self.ended.set_result(None)

    def fail(self, error: PdserveError) -> None:
        """End all answers with an error."""
        self.error = self.error or error
        if not self.ended.done():
            self.ended.set_exception(error)
            self.ended.exception()  # mark as retrieved: asyncio logs errors that are not awaited


class _GuardedAnswers:
    """All answers to one request. State: the gates of each, the first one outermost."""

    def __init__(self, walk: Walk, guards: Sequence[Guardrail]) -> None:
        self.exit = _Exit(walk.out, walk.request.sampling.n)
        self._walk, self._guards = walk, guards
        self._answers: dict[int, list[_Gate]] = {}

    def write(self, delta: AnswerDelta) -> bool:
        """Accept a delta. Return False if the client reads too slowly, the answer is refused, or a
        guard has failed."""
        gates = self._answers.get(delta.index)
        if gates is None:
            gates = self._answers[delta.index] = self._gates()
        for one in _divided(delta):
            gates[0].write(one)
        is_refused = self.is_refused(delta.index)
        if is_refused and (answers := self._walk.record.answers):
            answers[delta.index].cut = FinishReason.CONTENT_FILTER
        return self.exit.reads and not is_refused and self.exit.error is None

    def is_refused(self, index: int) -> bool:
        return any(x.is_refused for x in self._answers.get(index, ()))

    def _gates(self) -> list[_Gate]:
        request = self._walk.request
        subject = Subject(
            GuardPlace.ANSWER,
            request.request_id,
            request.tenant,
            request.served_name,
            request.regions,
        )
        # Stop strings and parsers hold text back, while its tokens go on.
        is_late = bool(request.sampling.stop) or request.parsing is not None
        gates: list[_Gate] = []
        for guard in reversed(self._guards):
            kind = _ServiceGate if guard.built_in is None else _PatternGate
            out = gates[0] if gates else self.exit
            gate = kind(guard, subject, out, is_late=is_late)
            gate.begin_after(request.resume_text)
            gates.insert(0, gate)
        return gates

    def close(self) -> None:
        self.exit.ended.cancel()
        for gates in self._answers.values():
            for gate in gates:
                gate.close()


class _Receiver(Protocol):
    def write(self, delta: AnswerDelta) -> None: ...
    def fail(self, error: PdserveError) -> None: ...


class _Held(Struct, eq=False):
    """A delta that waits. `begin`, `end`: place of its text in the whole answer, in characters."""

    delta: AnswerDelta
    begin: int
    end: int


class _Gate:
    """One guard before one answer. State: the deltas that wait; the kind of the last text; how many
    characters came, and how many are decided; what stands in place of text that is redacted, by
    begin and end; token ids and logprobs that leave with the last delta.
    """

    def __init__(
        self, guard: Guardrail, subject: Subject, out: _Receiver, *, is_late: bool
    ) -> None:
        """`is_late`: text may arrive after its tokens. These would tell what is redacted, so they
        wait for the end."""
        self._guard, self._subject, self._out = guard, subject, out
        self.fail = out.fail
        self.is_refused = False
        self._is_late = is_late
        self._waiting: deque[_Held] = deque()
        self._kind = ""
        self._size = self._decided = 0
        self._edits: deque[tuple[int, int, str]] = deque()
        self._is_edited = False
        self._ids: list[int] = []
        self._logprobs: list[PositionLogprobs] = []

    def write(self, delta: AnswerDelta) -> None:
        """Take a delta with at most one text."""
        kind, text = _text_of(delta)
        if text and kind != self._kind and not self.is_refused:
            if self._kind:
                self._decide(final=True)  # text of another kind does not go on
            self._kind = kind
        if self.is_refused:
            if delta.finish_reason is not None:
                self._out.write(_refused(delta))
            return
        self._waiting.append(_Held(delta, self._size, self._size + len(text)))
        self._size += len(text)
        self._add(text)
        self._decide(final=delta.finish_reason is not None)
        self._release()

    def begin_after(self, text: str) -> None:
        """Take the text that the client already has, before any other."""

    def _add(self, text: str) -> None:
        """Take more text of the present kind."""
        raise NotImplementedError

    def _decide(self, *, final: bool) -> None:
        """Decide text as far as possible. `final`: no more text of its kind follows."""
        raise NotImplementedError

    def close(self) -> None:
        """Decide nothing more."""

    def _refuse(self) -> None:
        """Drop what is held. What has left before cannot be taken back."""
        self.is_refused = True
        waiting, self._waiting = self._waiting, deque()
        for held in waiting:
            if held.delta.finish_reason is not None:
                self._out.write(_refused(held.delta))

    def _release(self) -> None:
        """Pass on the deltas whose text is decided, with what stands in its place. A token without
        text may belong to the text that follows, and waits for it."""
        ends = self._decided == self._size and self._waiting[-1].delta.finish_reason is not None
        while self._waiting and not self.is_refused:
            held = self._waiting[0]
            waits = held.begin == held.end == self._decided and not ends
            if waits or held.end > self._decided:
                return
            self._waiting.popleft()
            self._out.write(self._edited(held))

    def _edited(self, held: _Held) -> AnswerDelta:
        """Return a delta with what stands in place of its text, and without the tokens of text that
        is replaced. A token without text belongs to the text behind it."""
        delta, text, at, parts = held.delta, _text_of(held.delta)[1], held.begin, []
        is_edited = False
        while self._edits and self._edits[0][1] <= held.begin:
            self._edits.popleft()
        for begin, end, instead in self._edits:
            if begin >= max(held.end, held.begin + 1):
                break
            is_edited = True
            if held.begin <= begin < held.end:
                parts += [text[at - held.begin : begin - held.begin], instead]
            at = max(at, min(end, held.end))
        if is_edited:
            self._is_edited = True
            new = "".join([*parts, text[at - held.begin :]])
            delta = _with_text(delta, new) if text else structs.replace(delta)
            delta.token_ids, delta.logprobs = (), ()
        return self._without_early_tokens(delta) if self._is_late else delta

    def _without_early_tokens(self, delta: AnswerDelta) -> AnswerDelta:
        self._ids += delta.token_ids
        self._logprobs += delta.logprobs
        is_told = delta.finish_reason is not None and not self._is_edited
        return structs.replace(
            delta,
            token_ids=tuple(self._ids) if is_told else (),
            logprobs=tuple(self._logprobs) if is_told else (),
        )


class _PatternGate(_Gate):
    """State: the undecided text behind one character of context; whether there was a match."""

    def __init__(
        self, guard: Guardrail, subject: Subject, out: _Receiver, *, is_late: bool
    ) -> None:
        super().__init__(guard, subject, out, is_late=is_late)
        assert guard.built_in is not None
        self._checker = guard.built_in
        self._text, self._at = "", 0
        self._found = False

    def begin_after(self, text: str) -> None:
        # A match may begin in it: its places are negative.
        self._text = text[-self._guard.config.hold_back_chars :]
        self._decided = -len(self._text)

    def _add(self, text: str) -> None:
        self._text += text

    def _decide(self, *, final: bool) -> None:
        checker, text, before = self._checker, self._text, self._decided - self._at
        matches, decided = checker.patterns.scan(text, self._at, final=final)
        if matches := [(max(0, before + x), before + y) for x, y in matches if before + y > 0]:
            if not self._found:
                self._found = True
                self._guard.note(self._subject, checker.verdict)
            if checker.verdict is GuardVerdict.REFUSE:
                self._refuse()
                return
            if checker.verdict is GuardVerdict.REDACT:
                self._edits += [(*x, checker.replacement) for x in matches]
        self._decided = before + decided
        kept = 0 if final else max(0, decided - 1)
        self._text, self._at = ("", 0) if final else (text[kept:], decided - kept)

    def close(self) -> None:
        if not self._found:
            self._guard.note(self._subject, GuardVerdict.PASS)
            self._found = True


class _ServiceGate(_Gate):
    """State: the text of the present sentence; the pieces to check; the call in flight."""

    def __init__(
        self, guard: Guardrail, subject: Subject, out: _Receiver, *, is_late: bool
    ) -> None:
        super().__init__(guard, subject, out, is_late=is_late)
        self._text = ""
        self._pieces: deque[GuardedText] = deque()
        self._checking: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def _add(self, text: str) -> None:
        self._text += text

    def _decide(self, *, final: bool) -> None:
        config, cut = self._guard.config, 0
        if final:
            cut = len(self._text)
        elif config.pieces == "sentences":
            for end in _SENTENCE_END.finditer(self._text):
                cut = end.end()
            if len(self._text) - cut >= config.hold_back_chars:
                cut = len(self._text)
        self._cut(cut)
        if self._text and self._timer is None and config.pieces == "sentences":
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(config.hold_back_s, self._on_time)

    def _on_time(self) -> None:
        self._timer = None
        self._cut(len(self._text))

    def _cut(self, size: int) -> None:
        """Check the first `size` characters of the present text."""
        if not size:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._pieces.append(GuardedText(self._kind, self._text[:size]))
        self._text = self._text[size:]
        if self._checking is None or self._checking.done():
            self._checking = asyncio.create_task(self._check(), name="guard")

    async def _check(self) -> None:
        while self._pieces and not self.is_refused:
            kind, text = self._pieces.popleft()
            while self._pieces and self._pieces[0].kind == kind:
                text += self._pieces.popleft().text
            piece = GuardedText(kind if kind in ("text", "reasoning") else "tool_call", text)
            try:
                checked = await self._guard.check(self._subject, [piece])
            except PdserveError as error:
                self.fail(error)
                return
            if checked.verdict is GuardVerdict.REFUSE:
                self._refuse()
                return
            end = self._decided + len(text)
            if checked.verdict is GuardVerdict.REDACT and (instead := checked.texts[0]) != text:
                self._edits.append((self._decided, end, instead))
            self._decided = end
            self._release()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._checking is not None:
            self._checking.cancel()


def _divided(delta: AnswerDelta) -> list[AnswerDelta]:
    """Divide a delta into ones with at most one text. The last one has everything else."""
    if not isinstance(delta, ParsedDelta) or len(parts := [*pieces(delta)]) <= 1:
        return [delta]
    found = []
    for kind, text, call in parts:
        one = ParsedDelta(index=delta.index, tool_calls=() if call is None else (call,))
        found.append(one if call is not None else _with_text(one, text, str(kind)))
    rest = structs.replace(delta, text="", reasoning="", tool_calls=())
    return [*found, rest]


def _text_of(delta: AnswerDelta) -> tuple[str, str]:
    """Return kind and text of a delta that has at most one text. Each tool call is a kind."""
    for kind, text, _ in pieces(delta):
        return str(kind), text
    return "", ""


def _with_text(delta: AnswerDelta, text: str, kind: str = "") -> AnswerDelta:
    kind = kind or _text_of(delta)[0]
    if kind == "text":
        return structs.replace(delta, text=text)
    assert isinstance(delta, ParsedDelta)
    if kind == "reasoning":
        return structs.replace(delta, reasoning=text)
    calls = tuple(structs.replace(x, arguments=text) for x in delta.tool_calls)
    return structs.replace(delta, tool_calls=calls)


def _refused(delta: AnswerDelta) -> AnswerDelta:
    """Return the last delta of an answer without its content."""
    return AnswerDelta(
        finish_reason=FinishReason.CONTENT_FILTER,
        usage=delta.usage,
        receipt=delta.receipt,
        index=delta.index,
    )
