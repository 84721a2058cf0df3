"""Fuzz targets: functions of bytes around the parsers of untrusted input. Each target declares the
errors it may raise; any other error is a finding. `seeds` are inputs made by the project's own
code."""

from __future__ import annotations

import asyncio
import json
import os
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast
from zlib import crc32

import msgspec
from aiohttp import StreamReader
from aiohttp.base_protocol import BaseProtocol
from aiohttp.test_utils import make_mocked_request

from kv_transfer.cache.geometry import KvGroup
from kv_transfer.errors import KvTransferError, ProtocolError
from kv_transfer.protocol import messages as kv
from kv_transfer.protocol.consumer import Consumer
from kv_transfer.protocol.plan import CopyPlan, Shard
from kv_transfer.protocol.producer import Producer
from kv_transfer.settings import ConnectorConfig
from kv_transfer.transport.mapped import MappedTransport
from pdserve import wire
from pdserve.errors import InvalidRequest, PdserveError
from pdserve.model.tokenizer import Conversation, Tokenizer, read_files
from pdserve.net import framing
from pdserve.types import Constraint, StructuredOutput
from pdserve.v1 import parser_pb2, worker_pb2
from router.admission.constraints import check_constraint
from router.api.batch.http import BatchApi, CreateBatchRequest
from router.api.http_request import TENANT
from router.dialects import embeddings as pooling
from router.dialects.anthropic import CountTokensRequest, MessagesRequest
from router.dialects.fields import read
from router.dialects.openai import ChatRequest, CompletionRequest
from router.dialects.responses import ResponsesRequest
from router.dialects.tokens import DetokenizeRequest, TokenizeRequest

if TYPE_CHECKING:
    from collections.abc import Callable

DEMO = Path(__file__).parents[2] / "pdserve" / "demo" / "model"
FRAMES: tuple[Any, ...] = (
    worker_pb2.Command,
    worker_pb2.StepFrame,
    worker_pb2.RegisterRequest,
    parser_pb2.ParserCommand,
    parser_pb2.ParserReply,
)
GENERATE = (ChatRequest, CompletionRequest, ResponsesRequest, MessagesRequest)
OTHERS = (
    *(CountTokensRequest, TokenizeRequest, DetokenizeRequest, CreateBatchRequest),
    *(pooling.EmbeddingsRequest, pooling.ScoreRequest, pooling.RerankRequest),
)


@dataclass(frozen=True, slots=True)
class Form:
    """An encoding of values, after a prefix of `before` bytes with another meaning."""

    before: int
    decode: Callable[[bytes], Any]
    encode: Callable[[Any], bytes]


@dataclass(frozen=True, slots=True)
class Target:
    """One target. `raises`: the errors it may raise. `form`: the encoding of most of its input."""

    run: Callable[[bytes], None]
    raises: tuple[type[Exception], ...]
    seeds: Callable[[], list[bytes]]
    form: Form | None = None

    def __call__(self, data: bytes) -> None:
        with suppress(self.raises):
            self.run(data)


def choice(data: bytes, count: int) -> tuple[int, bytes]:
    """Return a number below `count` from the first byte, and the other bytes."""
    return (data[0] % count if data else 0), data[1:]


# -- frames between routers, workers and parsers


def frames(data: bytes) -> None:
    """Check that the messages do not depend on how the bytes are split."""
    number, data = choice(data, len(FRAMES))
    kind = FRAMES[number]
    whole = list(framing.FrameParser(kind, 1 << 16).feed(data))
    parser = framing.FrameParser(kind, 1 << 16)
    cut = [x for n in range(0, len(data), 3) for x in parser.feed(data[n : n + 3])]
    assert cut == whole
    for message in whole:
        if kind is worker_pb2.RegisterRequest:
            wire.worker_from_pb(message.worker)
        elif kind is worker_pb2.Command and message.WhichOneof("command") == "submit":
            wire.sampling_from_pb(message.submit.sampling, default_max_tokens=16)
        elif kind is worker_pb2.StepFrame:
            for delta in message.deltas:
                wire.delta_from_pb(delta)


def frame_seeds() -> list[bytes]:
    command = worker_pb2.Command()
    command.submit.request_id = "a"
    command.submit.prompt_token_ids.extend([1, 2])
    command.submit.sampling.temperature = 0.5
    command.submit.sampling.structured_output.regex = "a+"
    step = worker_pb2.StepFrame(deltas=[worker_pb2.StreamDelta(token_ids=[1], text="a")])
    worker = worker_pb2.RegisterRequest()
    worker.worker.worker_id = worker.worker.instance_id = worker.worker.address = "w"
    reply = parser_pb2.ParserReply()
    made = [command, step, worker, parser_pb2.ParserCommand(), reply]
    return [bytes([n]) + framing.pack(message) * 2 for n, message in enumerate(made)]


# -- KV messages, to machines with an open transfer


def kv_messages(data: bytes) -> None:
    """Feed messages with a valid CRC, each after its length."""
    producer: Producer[str] = Producer(
        plan=CopyPlan((Shard(2, 16, KvGroup(0, 4), (1,)),)),
        chunk_blocks={0: 1},
        hold_s=9.0,
        heartbeat_s=5.0,
    )
    producer.expect("t", "p", 0.0)
    producer.progress("t", [[1, 2]], 8, 0.0)
    producer.end("t", (7,), 0.0, held=True, request_id="p")
    consumer: Consumer[str] = Consumer(9.0)
    group = kv.GroupBlocks(0, 0, [3, 4], [0, 2, 0], [0, 1, 0])
    part = CopyPlan((Shard(2, 16, KvGroup(0, 4), (1,)),)).whole(0)
    consumer.subscribe("d", [("link", kv.Subscribe("t", 8, [group]), [part])], 0.0)
    while data:
        size, data = choice(data, 256)
        body, data = data[:size], data[size:]
        message = kv.decode(body + crc32(body).to_bytes(4, "little"))
        assert kv.decode(kv.pack(message)) == message
        to_machines(message, producer, consumer)
    producer.tick(99.0)
    consumer.tick(99.0)
    assert not len(consumer), "a transfer outlives its timeout"
    assert not len(producer), "a transfer outlives its lease"


def to_machines(message: kv.KvMessage, producer: Producer[str], consumer: Consumer[str]) -> None:
    """Give a message to both machines, as kv_transfer/protocol/link_threads.py does."""
    if isinstance(message, kv.ChunkReady):
        if consumer.begin_chunk("link", message) is not None:
            consumer.end_chunk("link", message, 0.0, 0.0, bytes(8 * message.count))
        return
    with suppress(ProtocolError):
        producer.on_message("link", message, 0.0)
    with suppress(ProtocolError):
        consumer.on_message("link", message, 0.0, "tcp", is_pull=False)


def kv_seeds() -> list[bytes]:
    group = kv.GroupBlocks(0, 0, [3, 4], [0, 2, 0], [0, 1, 0])
    made: list[list[kv.KvMessage]] = [
        [kv.Hello(kv.PROTOCOL_VERSION, "c", "p", "same", ["shm", "tcp"], b"n" * 16)],
        [kv.Welcome("p", "b", [{"name": "tcp"}], b"n", b"p"), kv.Select("tcp", {}, b"p")],
        [kv.Subscribe("t", 8, [group]), kv.Nack("t", 1), kv.Ack("t")],
        [kv.Subscribe("t", 8, [group], 2), kv.Cancel("t")],
        [kv.ChunkReady("t", 0, 1, 16, [1]), kv.ChunkReady("t", 1, 1, 16), kv.Heartbeat("t")],
        [kv.ChunkReady("t", 0, 2, 32), kv.TransferDone("t", [7], bytes(16), 0.1, 0.1)],
        [kv.Fail("t", "gone"), kv.RefuseHandshake("no"), kv.Inner(b"x")],
    ]
    bodies = [[kv.pack(message)[:-4] for message in row] for row in made]
    return [b"".join(bytes([len(x)]) + x for x in row) for row in bodies]


# -- offers of memory


@cache
def mapped() -> MappedTransport:
    return MappedTransport(ConnectorConfig())


def offers(data: bytes) -> None:
    try:
        offer = msgspec.msgpack.decode(data, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return
    region = SimpleNamespace(geometry=SimpleNamespace(num_layers=1))
    local: Any = SimpleNamespace(is_host=True, regions={0: region})
    mapped().consumer(local, offer, cast("Any", None))


def offer_seeds() -> list[bytes]:
    offer = {"socket": "0" * 16 + ".sock", "key": b"k" * 16, "size": 4096}
    made = [
        {**offer, "geometries": [[0, 1, 4, 64, 64, 256, 0]]},
        {**offer, "geometries": [[0, 1, 1 << 63, 1, 1, 1, 1]]},
        {**offer, "geometries": []},
    ]
    return [msgspec.msgpack.encode(x) for x in made]


# -- uploads

BOUNDARY = "b"


class NoStore:
    """A store that discards its files."""

    size = 0

    async def upload(self, tenant: str) -> NoStore:
        return self

    async def write(self, data: bytes) -> None:
        self.size += len(data)

    async def keep(self, *_: object) -> Any:
        raise InvalidRequest("kept")

    def discard(self) -> None:
        pass


async def _upload(data: bytes) -> None:
    stream = StreamReader(BaseProtocol(asyncio.get_running_loop()), 1 << 16)
    stream.feed_data(data)
    stream.feed_eof()
    kind = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"}
    request = make_mocked_request("POST", "/v1/files", kind, payload=stream)
    request[TENANT] = "t"
    api = BatchApi(cast("Any", NoStore()), cast("Any", None), max_file_bytes=1 << 20, endpoints=())
    await api.upload(request)


@cache
def loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()


def multipart(data: bytes) -> None:
    loop().run_until_complete(_upload(data))


def multipart_seeds() -> list[bytes]:
    purpose = b'Content-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    file = b'Content-Disposition: form-data; name="file"; filename="f"\r\n\r\n{}\n\r\n'
    mixed = b"Content-Type: multipart/mixed; boundary=c\r\n\r\n--c\r\n\r\n--c--\r\n"
    encoded = b"Content-Transfer-Encoding: base64\r\n" + file
    start, end = b"--b\r\n", b"--b--\r\n"
    made = [start + purpose + start + file, start + file, start + mixed, start + encoded, b""]
    return [x + end for x in made]


# -- bodies, and conversations in the model's chat template


def bodies(data: bytes) -> None:
    number, data = choice(data, len(GENERATE) + len(OTHERS))
    if number >= len(GENERATE):
        read((*GENERATE, *OTHERS)[number], data)  # type: ignore[type-var]
        return
    body = read(GENERATE[number], data)
    parsed = body.parse()
    assert len(body.without_prompt().parse()) == len(parsed)


def body_seeds() -> list[bytes]:
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": None}]
    tool = {"name": "f", "parameters": {"type": "object"}}
    chat = {"messages": turns, "tools": [{"type": "function", "function": tool}], "n": 2}
    answer = {"response_format": {"type": "json_object"}, "logprobs": True, "top_logprobs": 2}
    blocks = [{"type": "tool_result", "tool_use_id": "a", "content": "1"}]
    items = [{"type": "function_call_output", "call_id": "a", "output": "1"}]
    made: list[tuple[int, Any]] = [
        (0, {**chat, **answer}),
        (0, {"messages": turns, "structured_outputs": {"regex": "a+"}, "stop": ["x"]}),
        (1, {"prompt": [[1, 2], [3]], "logprobs": 1, "echo": True}),
        (2, {"input": items, "text": {"format": {"type": "text"}}, "max_output_tokens": 9}),
        (2, {"input": "Hi", "tools": [{"type": "function", **tool}], "store": False}),
        (3, {"messages": [{"role": "user", "content": blocks}], "max_tokens": 9}),
        (3, {"messages": turns[:1], "max_tokens": 9, "thinking": {"type": "disabled"}}),
        (5, {"prompt": "Hi"}),
        (6, {"tokens": [1]}),
        (8, {"input": ["a", "b"], "encoding_format": "base64"}),
        (10, {"query": "a", "documents": ["b"], "top_n": 1}),
    ]
    return [bytes([number]) + json.dumps(body).encode() for number, body in made]


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.load(read_files(DEMO))


def templates(data: bytes) -> None:
    (parsed,) = read(ChatRequest, data).parse()
    assert isinstance(parsed.prompt, Conversation)
    tokenizer().encode_chat(parsed.prompt)


def template_seeds() -> list[bytes]:
    hostile = "{{ messages.__class__ }}{% for x in range(9**9) %}<|end|>"
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    turns = [
        {"role": "system", "content": hostile},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "1"},
    ]
    variables = {"enable_thinking": False, "other": [{"a": hostile}]}
    made: list[Any] = [
        {"messages": turns, "chat_template_kwargs": variables},
        {
            "messages": [*turns[:2], {"role": "assistant", "content": "So"}],
            "continue_final_message": True,
            "add_generation_prompt": False,
        },
        {"messages": [{"role": "developer", "content": "x"}, turns[1]]},
    ]
    return [json.dumps(x).encode() for x in made]


# -- bounds of grammars


def constraints(data: bytes) -> None:
    kinds = [x for x in Constraint if x not in (Constraint.CHOICE, Constraint.JSON_OBJECT)]
    number, data = choice(data, len(kinds))
    text = data.decode(errors="ignore")
    check_constraint(StructuredOutput(kinds[number], text), field="f")


def constraint_seeds() -> list[bytes]:
    schema = {"type": "object", "properties": {"a": {"pattern": "(a|b)+[^]]*"}}}
    texts = [json.dumps(schema), "((a|b)*){2,9}", 'root ::= "(" [a-z] ")"']
    return [bytes([n]) + text.encode() for n in range(4) for text in texts]


JSON, MSGPACK = msgspec.json, msgspec.msgpack
TARGETS = {
    "bodies": Target(bodies, (InvalidRequest,), body_seeds, Form(1, JSON.decode, JSON.encode)),
    "constraints": Target(constraints, (InvalidRequest,), constraint_seeds),
    "frames": Target(frames, (InvalidRequest,), frame_seeds),
    "kv_messages": Target(kv_messages, (ProtocolError,), kv_seeds),
    "multipart": Target(multipart, (PdserveError,), multipart_seeds),
    "offers": Target(
        offers, (KvTransferError,), offer_seeds, Form(0, MSGPACK.decode, MSGPACK.encode)
    ),
    "templates": Target(
        templates, (InvalidRequest,), template_seeds, Form(0, JSON.decode, JSON.encode)
    ),
}
CORPUS = Path(__file__).parent / "corpus"


def write_seeds() -> None:
    """Write the seeds of all targets into the corpus."""
    for name, target in TARGETS.items():
        (CORPUS / name).mkdir(parents=True, exist_ok=True)
        for number, seed in enumerate(target.seeds()):
            (CORPUS / name / f"seed-{number}").write_bytes(seed)


if __name__ == "__main__":
    os.umask(0o022)
    write_seeds()
