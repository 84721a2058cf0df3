"""Guards that are services, before real answers of fake engines: over HTTP, and over gRPC as Envoy
asks its external processors."""

from __future__ import annotations

import json
import re
import ssl
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import grpc.aio
import pytest
from aiohttp import web
from msgspec import convert

from pdserve.config import GuardConfig
from pdserve.errors import ConfigError, Unavailable
from pdserve.types import FinishReason, SamplingParams
from pdserve.v1 import ext_proc_pb2 as p
from router.guardrails.guard import GuardedText, GuardPlace, Guards, GuardVerdict, Subject
from router.guardrails.open import open_guards
from router.guardrails.services import PROCESS
from tests.support.cluster import Cluster
from tests.support.pki import Ca
from tests.support.timeouts import wait_until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from pdserve.types import Regions
    from tests.support.pki import CertificateFiles

PROMPT = [20, 21, 22]
SAMPLING = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
SUBJECT = Subject(GuardPlace.PROMPT, "r", "acme", "m")
REFUSAL = p.ProcessingResponse(immediate_response=p.ImmediateResponse(details="no"))


class Service:
    """A guard over both protocols. `say` returns its verdict on a text, and what it puts in its
    place. `bodies`, `headers`: what it got. `posts`: the texts that came over HTTP."""

    def __init__(self) -> None:
        self.say: Callable[[str], tuple[str, str]] = lambda text: ("pass", text)
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.posts: list[str] = []
        self.delays_headers = False
        self.url = self.address = ""

    def _verdicts(self, data: bytes) -> tuple[set[str], list[str]]:
        body = json.loads(data)
        self.bodies.append(body)
        said = [self.say(x["content"]) for x in body["messages"]]
        return {x for x, _ in said}, [x for _, x in said]

    async def over_http(self, request: web.Request) -> web.Response:
        data = await request.read()
        self.posts += [x["content"] for x in json.loads(data)["messages"]]
        verdicts, texts = self._verdicts(data)
        if "broken" in verdicts:
            return web.Response(status=500)
        verdict = next((x for x in ("refuse", "redact", "log") if x in verdicts), "pass")
        messages = [{"content": x} for x in texts]
        return web.json_response({"verdict": verdict, "messages": messages, "reason": "why"})

    async def process(
        self, requests: AsyncIterator[p.ProcessingRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[p.ProcessingResponse]:
        """Answer headers at once, or with the body, as external processors do."""
        held: list[p.ProcessingResponse] = []
        async for request in requests:
            kind = request.WhichOneof("request")
            if kind.endswith("headers"):
                values = getattr(request, kind).headers.headers
                self.headers.append({x.key: x.raw_value.decode() for x in values})
                held.append(p.ProcessingResponse(**{kind: p.HeadersResponse()}))
            if not self.delays_headers or not kind.endswith("headers"):
                for reply in held:
                    yield reply
                held = []
            if kind.endswith("body"):
                for reply in self._replies(kind, getattr(request, kind).body):
                    yield reply

    def _replies(self, kind: str, data: bytes) -> list[p.ProcessingResponse]:
        verdicts, texts = self._verdicts(data)
        if "end" in verdicts:
            return []
        if "broken" in verdicts:
            raise RuntimeError
        if "refuse" in verdicts:
            return [REFUSAL]
        mutations = [p.BodyMutation()]
        body = json.dumps({"messages": [{"role": "x", "content": x} for x in texts]}).encode()
        if "redact" in verdicts:
            mutations = [p.BodyMutation(body=body)]
        if "stream" in verdicts:
            parts = (
                p.StreamedBodyResponse(body=body[:9]),
                p.StreamedBodyResponse(body=body[9:], end_of_stream=True),
            )
            mutations = [p.BodyMutation(streamed_response=x) for x in parts]
        if "clear" in verdicts:
            mutations = [p.BodyMutation(clear_body=True)]
        responses = [p.CommonResponse(body_mutation=x) for x in mutations]
        return [p.ProcessingResponse(**{kind: p.BodyResponse(response=x)}) for x in responses]


@asynccontextmanager
async def serving(tls: CertificateFiles | None = None) -> AsyncIterator[Service]:
    service, context = Service(), None
    if tls is not None:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(tls.cert, tls.key)
    app = web.Application()
    app.router.add_post("/check", service.over_http)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context)
    await site.start()
    scheme = "http" if tls is None else "https"
    service.url = f"{scheme}://127.0.0.1:{runner.addresses[0][1]}/check"
    server = grpc.aio.server()
    name, _, method = PROCESS.removeprefix("/").partition("/")
    handler = grpc.stream_stream_rpc_method_handler(
        service.process,
        request_deserializer=p.ProcessingRequest.FromString,
        response_serializer=p.ProcessingResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(name, {method: handler})])
    if tls is None:
        port = server.add_insecure_port("127.0.0.1:0")
    else:
        files = Path(tls.key).read_bytes(), Path(tls.cert).read_bytes()
        port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([files]))
    service.address = f"127.0.0.1:{port}"
    await server.start()
    try:
        yield service
    finally:
        await server.stop(None)
        await runner.cleanup()


class Notes:
    recent = None

    def note(self, *_: object) -> None: ...
    def refused(self, *_: object) -> None: ...


@asynccontextmanager
async def guard(**values: Any) -> AsyncIterator[Guards]:
    config: Any = type("Config", (), {"guards": [convert({"name": "g", **values}, GuardConfig)]})
    unused: Any = None
    async with open_guards(config, Notes(), unused, unused) as guards_of:  # type: ignore[arg-type]
        yield guards_of(unused)


PIECES = [GuardedText("user", "one"), GuardedText("tool", "two")]


async def check(
    guards: Guards, place: GuardPlace = GuardPlace.PROMPT, regions: Regions = None
) -> tuple[GuardVerdict, list[str]]:
    (one,) = guards.of(place, "acme", {"m"})
    checked = await one.check(Subject(place, "r", "acme", "m", regions), PIECES)
    return checked.verdict, list(checked.texts)


async def test_an_http_service_decides() -> None:
    async with serving() as service, guard(url=service.url) as guards:
        assert await check(guards) == (GuardVerdict.PASS, [])
        assert service.bodies[0] == {
            "request_id": "r",
            "tenant": "acme",
            "model": "m",
            "place": "prompt",
            "messages": [
                {"role": "user", "content": "one", "kind": ""},
                {"role": "tool", "content": "two", "kind": ""},
            ],
        }
        service.say = lambda text: ("redact", text.upper())
        assert await check(guards) == (GuardVerdict.REDACT, ["ONE", "TWO"])
        for said in ("refuse", "log"):
            service.say = lambda text, said=said: (said, text)  # type: ignore[misc]
            assert await check(guards) == (GuardVerdict(said), [])
        service.say = lambda text: ("broken", text)
        with pytest.raises(Unavailable):
            await check(guards)


@pytest.mark.parametrize("delays_headers", [False, True])
async def test_an_external_processor_decides(delays_headers: bool) -> None:
    async with serving() as service, guard(ext_proc=service.address) as guards:
        service.delays_headers = delays_headers
        assert await check(guards) == (GuardVerdict.PASS, [])
        assert service.headers[0][":method"] == "POST"
        assert service.headers[0]["x-pdserve-tenant"] == "acme"
        assert await check(guards, GuardPlace.ANSWER) == (GuardVerdict.PASS, [])
        assert service.headers[1][":status"] == "200"
        assert [x["kind"] for x in service.bodies[1]["messages"]] == ["user", "tool"]
        for said in ("redact", "stream"):
            service.say = lambda text, said=said: (said, text.upper())  # type: ignore[misc]
            assert await check(guards) == (GuardVerdict.REDACT, ["ONE", "TWO"])
        service.say = lambda text: ("redact", text)
        assert await check(guards) == (GuardVerdict.PASS, [])
        service.say = lambda text: ("clear", text)
        assert await check(guards) == (GuardVerdict.REDACT, ["", ""])
        service.say = lambda text: ("refuse", text)
        assert await check(guards) == (GuardVerdict.REFUSE, [])
        service.say = lambda text: ("end", text)
        assert await check(guards) == (GuardVerdict.PASS, [])
        service.say = lambda text: ("broken", text)
        with pytest.raises(Unavailable):
            await check(guards)


@pytest.mark.parametrize("kind", ["url", "ext_proc"])
async def test_the_certificate_of_a_service_is_verified(kind: str, tmp_path: Path) -> None:
    ca, other = Ca(tmp_path, "ca"), Ca(tmp_path, "other")
    async with serving(ca.issue("guard")) as service:
        at = {kind: service.url if kind == "url" else service.address}
        async with guard(**at, ca_file=ca.path, timeout_s=30.0) as guards:
            assert await check(guards) == (GuardVerdict.PASS, [])
        async with guard(**at, ca_file=other.path, timeout_s=30.0) as guards:
            with pytest.raises(Unavailable):
                await check(guards)
        assert len(service.bodies) == 1
    with pytest.raises(ConfigError, match=r"guards\[0\]\.ca_file"):
        async with guard(**at, ca_file=str(tmp_path / "none.pem")):
            raise AssertionError


async def test_texts_are_not_sent_to_a_service_in_a_region_where_they_may_not_be() -> None:
    async with serving() as service:
        async with guard(url=service.url, region="us") as guards:
            for regions in (None, frozenset({"eu", "us"})):
                assert await check(guards, regions=regions) == (GuardVerdict.PASS, [])
            with pytest.raises(Unavailable):
                await check(guards, regions=frozenset({"eu"}))
        async with guard(url=service.url, region="us", on_failure="open") as guards:
            assert await check(guards, regions=frozenset({"eu"})) == (GuardVerdict.PASS, [])
        assert len(service.bodies) == 2


async def test_a_file_of_words_is_read_at_the_start(tmp_path: Path) -> None:
    words = tmp_path / "words"
    words.write_text("bomb\n\ntwo\n", "utf-8")
    async with guard(words_file=str(words), verdict="redact") as guards:
        assert await check(guards) == (GuardVerdict.REDACT, ["one", "[redacted]"])


async def test_answers_of_a_service_are_redacted_refused_and_explained(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async with serving() as service:
        audit = tmp_path / "audit.log"
        guards = [
            {"name": "over-http", "url": service.url, "places": ["answer"], "on_failure": "open"},
            {"name": "processor", "ext_proc": service.address, "places": ["answer"]},
        ]
        for each in guards:
            each |= {"hold_back_chars": 16, "timeout_s": 30.0}
        router = {"guards": [convert(x, GuardConfig) for x in guards], "log": {"audit": str(audit)}}
        async with Cluster(prefill=1, decode=1, router=router) as cluster:
            whole = cluster.expected(PROMPT, SAMPLING)
            assert (await cluster.ask(PROMPT, SAMPLING)).text == whole.text
            first = whole.text[:1]
            service.say = lambda text: ("redact", text.replace(first, "#"))
            redacted = await cluster.ask(PROMPT, SAMPLING)
            assert redacted.text == whole.text.replace(first, "#")
            assert redacted.finish_reason is FinishReason.LENGTH
            service.posts.clear()
            # The first guard refuses its fourth piece, which the second one does not get.
            service.say = lambda text: ("refuse" if text in service.posts[3:] else "pass", text)
            long = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True)
            refused = await cluster.ask(PROMPT, long, request_id="gen-refused")
            assert refused.finish_reason is FinishReason.CONTENT_FILTER
            assert refused.text
            assert "".join(service.posts[:3]).startswith(refused.text)
            assert refused.usage is not None
            # What was generated counts, and generation ended with the verdict.
            assert 3 < refused.usage.completion_tokens < 400
            service.say = lambda text: ("broken", text)
            with pytest.raises(Unavailable, match="'processor' gave no verdict on the answer"):
                await cluster.ask(PROMPT, SAMPLING)
            assert await cluster.command("explain", "gen-refused") == 0
            shown = capfd.readouterr().out
            assert re.search("guard over-http, answer: refuse in .* ms: why", shown)
            counts = await cluster.metrics()
            for labels in (
                'guard="over-http",place="answer",verdict="redact"',
                'guard="over-http",place="answer",verdict="failed"',
                'guard="processor",place="answer",verdict="failed"',
            ):
                assert f"pdserve_guard_verdicts_total{{{labels}}}" in counts
            lines = [json.loads(x) for x in audit.read_text("utf-8").splitlines()]
            entry = next(x for x in lines if x.get("request_id") == "gen-refused")
            del entry["time"]
            assert entry == {
                "action": "guard",
                "guard": "over-http",
                "place": "answer",
                "verdict": "refuse",
                "tenant": "",
                "model": "pdserve-demo",
                "request_id": "gen-refused",
            }
            await wait_until(lambda: not cluster.busy("decode-0", "prefill-0"))


async def test_a_classifier_compares_texts_with_examples() -> None:
    """Embeddings of fake workers are equal for equal texts, and others are not alike."""
    examples = {"model": "pdserve-demo", "flagged": ["a bad text"], "harmless": ["a good text"]}
    values = {"name": "nearest", "classifier": examples, "timeout_s": 30.0, "places": ["prompt"]}
    router = {"guards": [convert(values, GuardConfig)]}
    async with (
        Cluster(aggregated=1, pooling=1, router=router) as cluster,
        aiohttp.ClientSession(f"http://{cluster.http}") as http,
    ):

        async def ask(text: str) -> int:
            body = {"messages": [{"role": "user", "content": text}], "max_tokens": 2}
            async with http.post("/v1/chat/completions", json=body) as response:
                return response.status

        assert [await ask(f"a {x} text") for x in ("good", "bad", "third")] == [200, 400, 200]
