"""One request on a fake engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from msgspec import structs

from pdserve.types import FinishReason, PhaseReport, StreamDelta, TransferReport
from workers.engine import DecodePhase, EncodePhase, PoolingPhase, PrefillPhase
from workers.fake import model
from workers.fake.transfers import FakeKv

if TYPE_CHECKING:
    import asyncio

    from pdserve.types import PositionLogprobs
    from workers.engine import Work


@dataclass(slots=True)
class Sequence:
    """One request. `kv` covers the prompt and all of `generated` but the last token; it is None
    until it was computed or received."""

    work: Work
    vocab_size: int
    blocks: int = 0
    submitted_at: float = 0.0
    admitted_at: float = 0.0
    first_at: float = 0.0
    cached_tokens: int = 0
    kv: bytes | None = None
    generated: list[int] = field(init=False)
    text: model.Text = field(init=False)
    fetch: asyncio.Task[None] | None = None
    transfer: TransferReport | None = None
    weights: str = ""
    is_stale: bool = False  # some of `kv` is of older weights than `weights`

    def __post_init__(self) -> None:
        self.generated = list(self.work.resume_token_ids)
        self.text = model.Text(self.work.sampling)
        self.text.resume(self.generated)

    @property
    def context(self) -> int:
        return len(self.work.prompt_token_ids) + len(self.generated)

    @property
    def handoff(self) -> FakeKv:
        """Return the data that another engine needs to continue after the last token."""
        assert self.kv is not None
        return FakeKv(self.kv, self.blocks, self.generated[-1])

    def receive(self, handoff: FakeKv, report: TransferReport, *, is_wrong: bool = False) -> None:
        """Take KV and first token from a prefill, or the KV alone from an engine that decoded. Use
        other KV in its place if `is_wrong`."""
        phase = self.work.phase
        if not (isinstance(phase, DecodePhase) and phase.live):
            self.generated.append(handoff.token)
            self.text.resume([handoff.token])
        self.kv = model.kv_of((), handoff.kv.hex()) if is_wrong else handoff.kv
        self.transfer = report

    def advance(self, now: float) -> StreamDelta:
        """Generate one token."""
        sampling, stream_id = self.work.sampling, self.work.stream_id
        if len(self.generated) >= sampling.max_tokens:
            return self.end(StreamDelta(stream_id), FinishReason.LENGTH, now)
        if is_first := self.kv is None:
            seed = self.work.adapter + self.weights
            kv = model.kv_of(self.work.prompt_token_ids, seed, self.work.media)
            self.kv = model.extend(kv, self.generated, self.weights)
        else:
            self.kv = model.extend(self.kv, self.generated[-1:], self.weights)
        if isinstance(self.work.phase, PoolingPhase):
            embedding = model.embedding_of(self.work.prompt_token_ids)
            return self.end(StreamDelta(stream_id, embedding=embedding), FinishReason.STOP, now)
        if isinstance(self.work.phase, EncodePhase):  # no features are computed
            report = PhaseReport(
                self.admitted_at - self.submitted_at, encode_s=now - self.admitted_at
            )
            return StreamDelta(stream_id, finish_reason=FinishReason.STOP, report=report)
        is_early = len(self.generated) < sampling.min_tokens
        forbidden = {model.EOS, *sampling.stop_token_ids} if is_early else ()
        token = model.next_token(self.kv, sampling.seed, self.vocab_size, forbidden)
        self.generated.append(token)
        self.first_at = self.first_at or now
        is_eos = token == model.EOS and not sampling.ignore_eos
        is_stop_token = token in sampling.stop_token_ids and not is_eos
        silent = is_stop_token and not sampling.include_stop_str_in_output
        stop_string = self.text.push(token, silent=silent)
        stop = token if is_stop_token else stop_string
        logprobs: tuple[PositionLogprobs, ...] = ()
        if sampling.logprobs is not None:
            logprobs = (model.logprobs_of(token, sampling.logprobs),)
        delta = StreamDelta(stream_id, (token,), logprobs=logprobs, stop_reason=stop)
        if is_first and (count := self.work.prompt_logprobs) is not None:
            delta.prompt_logprobs = self._prompt_logprobs(count)
        if sampling.routed_experts:
            before = (*self.work.prompt_token_ids, *self.generated[:-1])
            is_whole = is_first and self.work.needs_whole_prompt
            delta.routed_experts = model.experts_of(before if is_whole else before[-1:])
        if stop is not None or is_eos:
            return self.end(delta, FinishReason.STOP, now)
        is_full = len(self.generated) >= sampling.max_tokens
        if is_full or isinstance(self.work.phase, PrefillPhase):
            return self.end(delta, FinishReason.LENGTH, now, goes_on=not is_full)
        return structs.replace(delta, text=self.text.take(finished=False))

    def _prompt_logprobs(self, alternatives: int) -> tuple[PositionLogprobs, ...]:
        """Return the logprobs of the prompt. From `scored_from` on they are those of an answer to
        the tokens before; without it, each token counts as the likeliest."""
        work, start = self.work, self.work.scored_from
        if not start:
            return model.prompt_logprobs_of(work.prompt_token_ids, alternatives)
        prompt, answer = work.prompt_token_ids[:start], work.prompt_token_ids[start:]
        kv = model.kv_of(prompt, work.adapter + self.weights, work.media)
        seed = work.sampling.seed
        return model.scores_of(kv, answer, seed, self.vocab_size, alternatives, self.weights)

    def end(
        self, last: StreamDelta, reason: FinishReason, now: float, *, goes_on: bool = False
    ) -> StreamDelta:
        """Return the last delta. With `goes_on`, text that may become a stop string is kept."""
        first = self.first_at or now
        is_decode = isinstance(self.work.phase, DecodePhase)
        report = PhaseReport(
            queue_s=self.admitted_at - self.submitted_at,
            prefill_s=0.0 if is_decode else first - self.admitted_at,
            decode_s=now - first,
            cached_tokens=self.cached_tokens,
            transfer=self.transfer,
        )
        text = self.text.take(finished=not goes_on)
        return structs.replace(last, text=text, finish_reason=reason, report=report)
