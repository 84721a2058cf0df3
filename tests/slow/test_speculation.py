"""Speculative decoding. Greedy answers are those of an engine without it, also through a hand-off
and a move with KV. Sampling follows the model. Drafts without KV speculate on the decode engine;
the KV of other drafts moves with the model's."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import dataclass, replace
from importlib.util import find_spec
from operator import itemgetter
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from kv_transfer.settings import ConnectorConfig
from pdserve.demo import MODEL_DIR as MODEL
from pdserve.errors import UnsupportedField
from pdserve.model import prefix_hash
from pdserve.model.tokenizer import ChatMessage, Conversation, Tokenizer, read_files
from pdserve.types import Constraint, FinishReason, SamplingParams, StructuredOutput
from tests.support.cluster import Cluster
from tests.support.engine_pair import EnginePair, JoinedAnswer, joined
from tests.support.engines import EngineProcess, settings
from tests.support.started_workers import vllm
from tests.support.tiny_models import eagle_draft, with_mtp_layer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.support.open_request import OpenRequest


pytestmark = pytest.mark.asyncio(loop_scope="session")
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}
SUFFIX = {"method": "suffix", "num_speculative_tokens": 4}
# The model as its own draft: vLLM accepts every token if the draft's KV is right, too.
DRAFT = {"method": "draft_model", "model": str(MODEL), "num_speculative_tokens": 3}
EAGLE = {"method": "eagle", "num_speculative_tokens": 3}
MTP = {"method": "mtp", "num_speculative_tokens": 1}
METHOD = itemgetter("method")
QUESTIONS = (
    "Write JSON: Ines, 44, Oslo",
    "Count from 1 to 12.",
    "What does a prefill worker do?",
    "Repeat: the cat and the cat and the cat and the cat",
)
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=96, ignore_eos=True),
    "penalties": SamplingParams(
        temperature=0.0,
        max_tokens=96,
        ignore_eos=True,
        presence_penalty=0.3,
        repetition_penalty=1.1,
    ),
    "logprobs": SamplingParams(temperature=0.0, max_tokens=48, logprobs=3),
    "structured": SamplingParams(
        temperature=0.0,
        max_tokens=64,
        structured_output=StructuredOutput(Constraint.REGEX, "([a-c]{3}-[0-9]{2} )+"),
    ),
}


class Plain:
    """An engine that does not speculate, and its answers."""

    def __init__(self, engine: EngineProcess) -> None:
        self._engine = engine
        self._answers: dict[tuple[tuple[int, ...], str], JoinedAnswer] = {}

    async def answer(self, ids: list[int], sampling: SamplingParams) -> JoinedAnswer:
        """Each method of speculation is compared with the same answers: compute them once."""
        key = tuple(ids), repr(sampling)
        if key not in self._answers:
            self._answers[key] = joined(await self._engine.run(ids, sampling))
        return self._answers[key]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def plain() -> AsyncIterator[Plain]:
    engine = await EngineProcess.start(settings(MODEL))
    yield Plain(engine)
    await engine.close()


METHODS = [NGRAM, SUFFIX, DRAFT, EAGLE, MTP]


@dataclass
class Speculating(EnginePair):
    """With `drafts_whole` every token of a draft is the model's own. With `drops_a_block` the last
    cached block of a prompt is computed again, for the draft."""

    drafts_whole: bool = False
    drops_a_block: bool = False


@pytest_asyncio.fixture(scope="module", loop_scope="session", params=METHODS, ids=METHOD)
async def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Speculating]:
    if request.param is SUFFIX and find_spec("arctic_inference") is None:
        pytest.skip("needs the package arctic-inference")
    model, speculates = MODEL, {"speculative_config": request.param}
    if request.param is EAGLE:
        draft = eagle_draft(MODEL, tmp_path_factory.mktemp("draft"))
        speculates = {"speculative_config": {**EAGLE, "model": str(draft)}}
    if request.param is MTP:
        model = with_mtp_layer(MODEL, tmp_path_factory.mktemp("model"))
    alone = request.param in (NGRAM, SUFFIX)
    prefill = await EngineProcess.start(
        settings(model, kv=ConnectorConfig(), instance_id="p", **({} if alone else speculates))
    )
    decode = await EngineProcess.start(
        settings(model, kv=ConnectorConfig(), instance_id="d", **speculates)
    )
    drops = request.param in (EAGLE, MTP)
    yield Speculating(
        prefill, decode, "p", drafts_whole=request.param is DRAFT, drops_a_block=drops
    )
    await decode.close()
    await prefill.close()


def asked(question: str) -> list[int]:
    messages = [ChatMessage("user", question)]
    return list(Tokenizer.load(read_files(MODEL)).encode_chat(Conversation(messages)))


@pytest.mark.parametrize("kind", SAMPLINGS)
async def test_a_handoff_to_a_speculating_engine_is_exact(
    pair: Speculating, plain: Plain, kind: str
) -> None:
    accepting = 0
    for question in QUESTIONS:
        ids = asked(question)
        found = await pair.run(ids, SAMPLINGS[kind])
        expected = await plain.answer(ids, SAMPLINGS[kind])
        assert (found.token_ids, found.text) == (expected.token_ids, expected.text)
        assert found.finish_reason == expected.finish_reason
        sizes = [len(delta.token_ids) for delta in pair.last[-1].deltas]
        accepting += max(sizes) > 1
        if pair.drafts_whole and kind == "greedy":
            assert set(sizes[1:-1]) == {4}, "the draft's KV of the prompt is not the model's"
    assert accepting
    await pair.until_empty()


@pytest.mark.parametrize("question", [QUESTIONS[1], QUESTIONS[3]])
async def test_a_move_takes_the_kv_of_accepted_tokens_alone(
    pair: EnginePair, plain: Plain, question: str
) -> None:
    ids, endless = asked(question), replace(SAMPLINGS["greedy"], max_tokens=8000)
    is_exported = False
    while not is_exported:  # its answer may end before the export comes
        stream_id = pair.decode.submit(ids, endless)
        head = pair.decode.answer(stream_id)
        await pair.decode.until(lambda head=head: len(head.token_ids) >= 12)
        pair.decode.export(stream_id, f"live {question}")
        await pair.decode.collect(stream_id)
        is_exported = head.finish_reason is FinishReason.ABORT
    assert head.deltas[-1].exported_tokens == len(head.token_ids)
    phase = replace(pair.decode.decode_phase(f"live {question}"), live=True)
    sampling = replace(endless, max_tokens=len(head.token_ids) + 60)
    tail = await pair.prefill.run(ids, sampling, phase, resume=head.token_ids)
    assert joined(head, tail).token_ids == (await plain.answer(ids, sampling)).token_ids
    await pair.until_empty()


async def test_routers_get_the_cached_blocks(pair: Speculating) -> None:
    ids = 4 * asked(QUESTIONS[2])
    for _ in range(2):
        await pair.run(ids, SAMPLINGS["logprobs"])
    cached, size = await pair.prefill.cached_blocks(), pair.prefill.info.block_size
    root = prefix_hash.root(pair.prefill.info.model.name, size)
    usable = prefix_hash.usable_blocks(len(ids), size)
    told = [x in cached for x in prefix_hash.chain(ids, size, root, blocks=usable)]
    report = pair.last[0].report
    assert report is not None
    assert told == [True] * usable
    assert usable - report.cached_tokens // size == pair.drops_a_block


@pytest.mark.parametrize("pair", [NGRAM], ids=METHOD, indirect=True, scope="module")
async def test_sampling_follows_the_model(pair: EnginePair) -> None:
    """vLLM's own CPU sampler gets none of 64 almost certain answers right."""
    ids = asked(QUESTIONS[0])
    certain = await pair.decode.run(ids, SamplingParams(temperature=0.0, max_tokens=40))
    sampled = [
        pair.decode.submit(ids, SamplingParams(temperature=0.3, max_tokens=40)) for _ in range(64)
    ]
    texts = [(await pair.decode.collect(stream)).text for stream in sampled]
    assert texts.count(certain.text) >= 60


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def service() -> AsyncIterator[Cluster]:
    async with Cluster(engine=vllm(MODEL)) as service:
        await service.add("prefill-0")
        for name in ("decode-0", "decode-1"):
            await service.add(name, engine_args={"speculative_config": NGRAM})
        await service.until_ready()
        yield service


@pytest.mark.parametrize(("field", "value"), [("min_p", 0.1), ("logit_bias", {5: 1.0})])
async def test_fields_that_speculation_ignores_are_refused(
    service: Cluster, field: str, value: object
) -> None:
    """Cancel before the first token."""
    sampling = SamplingParams(temperature=0.5, **{field: value})  # type: ignore[arg-type]
    async with aclosing(service.client.generate(asked(QUESTIONS[0]), sampling)) as deltas:  # type: ignore[type-var]
        with pytest.raises(UnsupportedField) as refused:
            await anext(deltas)
    assert refused.value.field == field


async def left(service: Cluster, sampling: SamplingParams) -> list[OpenRequest]:
    """Return answers to all questions, of which one decode worker was drained and the other
    killed."""
    await service.drain("decode-1")
    answers = [service.open(asked(question), sampling) for question in QUESTIONS]
    for each in answers:
        await each.until(12)
    await service.undrain("decode-1")
    await service.drain("decode-0")
    await service.undrain("decode-0")
    for each in answers:
        await each.until(each.tokens + 12)
    await service.kill("decode-1")
    for each in answers:
        await each.end()
    return answers


async def test_answers_of_a_service_leave_speculating_workers_exactly(
    service: Cluster, plain: Plain
) -> None:
    """They are asked again if all ended before their worker left."""
    sampling = replace(SAMPLINGS["greedy"], max_tokens=2000)
    expected = [await plain.answer(asked(question), sampling) for question in QUESTIONS]
    fallbacks: list[tuple[str, ...]] = []
    while ("live_kv:moved", "pair:worker_failed") not in fallbacks:
        if fallbacks:
            await service.add("decode-1", engine_args={"speculative_config": NGRAM})
            await service.until_ready()
        answers = await left(service, sampling)
        for each, answer in zip(answers, expected, strict=True):
            (found,) = await each.end()
            assert (found.token_ids, found.text) == (answer.token_ids, answer.text)
        fallbacks = [each.fallbacks for each in answers]
    await service.until_empty()
    load = (await service.entries())["decode-0"].load
    assert 0 < load.accepted_draft_tokens < load.draft_tokens
