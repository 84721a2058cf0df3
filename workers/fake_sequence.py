"""One request inside the fake engine: its tokens, its text, and when it ends."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from pdserve.types import FinishReason, PhaseReport, StreamDelta
from workers.engine import DecodePhase, PrefillPhase
from workers.fake_text import FakeText
from workers.fake_tokens import EOS, extend, kv_of, logprobs_of, next_token

if TYPE_CHECKING:
    from pdserve.types import PositionLogprobs, TransferReport
    from workers.engine import Work


@dataclass(frozen=True, slots=True)
class Handoff:
    """What travels from prefill to decode: the KV (a digest), its size, and the first token."""

    kv: bytes
    blocks: int
    first_token: int


@dataclass(slots=True)
class _SharedBlocks:
    """Blocks of a prompt that several answers go on from."""

    blocks: int
    users: int = 1


@dataclass(slots=True)
class FakeSequence:
    """Mutable state of one request; only the core changes it.

    `kv` covers the prompt and all of `generated`; None until it was computed or received.
    `cached_tokens` of the prompt were in the engine's prefix cache.
    """

    work: Work
    vocab_size: int
    blocks: int
    submitted_at: float
    admitted_at: float = 0.0
    first_at: float = 0.0
    kv: bytes | None = None
    kv_before: bytes | None = None  # without the last of `generated`
    generated: list[int] = field(default_factory=list)
    transfer: TransferReport | None = None
    cached_tokens: int = 0
    shared: _SharedBlocks | None = None
    text: FakeText = field(init=False)

    def __post_init__(self) -> None:
        self.text = FakeText(self.work.sampling)
        self.generated.extend(self.work.resume_token_ids)
        self.text.prime(self.work.resume_token_ids)

    @property
    def prefill_tokens(self) -> int:
        """Tokens whose KV the next step has to compute before it samples."""
        return 0 if self.kv is not None else self.context - self.cached_tokens

    @property
    def context(self) -> int:
        """Tokens of prompt and answer so far."""
        return len(self.work.prompt_token_ids) + len(self.generated)

    @property
    def is_decode(self) -> bool:
        return isinstance(self.work.phase, DecodePhase)

    def share(self, fork: FakeSequence, blocks: int) -> None:
        """`fork` has the first `blocks` of this sequence, which are free when both are gone."""
        if self.shared is None:
            self.shared, self.blocks = _SharedBlocks(blocks), self.blocks - blocks
        self.shared.users += 1
        fork.shared = self.shared

    def give_back(self) -> int:
        """The blocks that are free when this sequence is gone."""
        shared, self.shared = self.shared, None
        if shared is None:
            return self.blocks
        shared.users -= 1
        return self.blocks if shared.users else self.blocks + shared.blocks

    def receive(self, handoff: Handoff, report: TransferReport) -> None:
        """Takes KV and first token from a prefill worker, or KV alone from one that has decoded."""
        phase = self.work.phase
        if not (isinstance(phase, DecodePhase) and phase.live):
            self.generated.append(handoff.first_token)
            self.text.prime([handoff.first_token])
        self.kv_before = handoff.kv
        self.kv = extend(handoff.kv, self.generated[-1:])
        self.transfer = report

    def advance(self, now: float) -> tuple[StreamDelta, Handoff | None]:
        """Samples one token; a prefill that does not end the answer also yields its handoff."""
        sampling = self.work.sampling
        if self.kv is None:
            self.kv = extend(kv_of(self.work.prompt_token_ids), self.generated)
        if len(self.generated) >= sampling.max_tokens:
            return self._end(StreamDelta(self.work.stream_id), FinishReason.LENGTH, now), None
        kv, token, logprobs = self.kv, *self._sample(self.kv)
        self.kv_before, self.kv = kv, extend(kv, [token])
        self.generated.append(token)
        self.first_at = self.first_at or now
        reason = self._stop_reason(token)
        is_over = reason is not None or self._is_eos(token)
        is_prefill = isinstance(self.work.phase, PrefillPhase)
        if not (is_over or is_prefill or len(self.generated) >= sampling.max_tokens):
            text = self.text.take(finished=False)
            return StreamDelta(self.work.stream_id, (token,), text, logprobs), None
        delta = StreamDelta(self.work.stream_id, (token,), logprobs=logprobs, stop_reason=reason)
        if is_over:
            return self._end(delta, FinishReason.STOP, now), None
        goes_on = is_prefill and len(self.generated) < sampling.max_tokens
        ended = self._end(delta, FinishReason.LENGTH, now, goes_on=goes_on)
        return ended, Handoff(kv, self.blocks, token) if is_prefill else None

    def export(self, now: float) -> tuple[StreamDelta, Handoff] | None:
        """Ends here, to go on elsewhere; None where there is no KV of all tokens but the last."""
        if self.kv_before is None or isinstance(self.work.phase, PrefillPhase):
            return None
        last = StreamDelta(self.work.stream_id, exported_tokens=len(self.generated))
        ended = self._end(last, FinishReason.ABORT, now, goes_on=True)
        return ended, Handoff(self.kv_before, self.give_back(), self.generated[-1])

    def _sample(self, kv: bytes) -> tuple[int, tuple[PositionLogprobs, ...]]:
        sampling = self.work.sampling
        last = self.generated[-1] if self.generated else None
        early = len(self.generated) < sampling.min_tokens
        token = next_token(
            kv,
            seed=sampling.seed,
            last=last,
            vocab_size=self.vocab_size,
            forbidden={EOS, *sampling.stop_token_ids} if early else (),
        )
        if sampling.logprobs is None:
            return token, ()
        count = sampling.logprobs
        return token, (logprobs_of(kv, token, alternatives=count, vocab_size=self.vocab_size),)

    def _is_eos(self, token: int) -> bool:
        return token == EOS and not self.work.sampling.ignore_eos

    def _stop_reason(self, token: int) -> str | int | None:
        sampling = self.work.sampling
        if token in sampling.stop_token_ids and not self._is_eos(token):
            self.text.push(token, silent=not sampling.include_stop_str_in_output)
            return token
        return self.text.push(token)

    def _end(
        self, delta: StreamDelta, reason: FinishReason, now: float, *, goes_on: bool = False
    ) -> StreamDelta:
        first = self.first_at or now
        report = PhaseReport(
            queue_s=self.admitted_at - self.submitted_at,
            prefill_s=0.0 if self.is_decode else first - self.admitted_at,
            decode_s=now - first,
            cached_tokens=0 if self.is_decode else self.cached_tokens,
            transfer=self.transfer,
        )
        text = self.text.take(finished=not goes_on)
        return replace(delta, text=text, finish_reason=reason, report=report)
