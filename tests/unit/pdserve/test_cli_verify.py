"""`pdserve verify` against a scripted endpoint that keeps every promise, or breaks one."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import random
import signal
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web

from pdserve.cli import build_parser
from pdserve.cli.verify.checks import CHECKS, NOWHERE, solid_png
from pdserve.cli.verify.endpoint import Endpoint
from pdserve.cli.verify.outcome import CheckFailed, NotApplicable, Passed
from pdserve.cli.verify.report import run_check
from pdserve.cli.verify.weights import UPDATED_ANSWER_TOKENS
from pdserve.errors import ConfigError
from tests.support.commands import ROOT
from tests.support.timeouts import WAIT_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from pdserve.cli.verify.outcome import Outcome

Body = dict[str, Any]
BY_NAME = {check.name: check for check in CHECKS}
CONTEXT = 3000
WORDS = ("prefill", "computes", "the", "prompt", "and", "decode", "makes", "tokens", "of", "it")
CALL = ('{"phase": ', '"decode", ', '"fast": true}')
# Enough for what this server does at once; a check that hangs is found after this.
SOON_S = 1.0
# Half of it is polled to the end; the other half is for the requests, on a busy machine too.
POLLED_S = 6.0
SLOTS = 4


class Server:
    """An endpoint with SLOTS slots. `faults` names what it does wrong, or does not offer."""

    def __init__(self, *faults: str) -> None:
        self.faults = set(faults)
        self.requests = self.asked_tokens = self.running = self.handed_over = 0
        self.unfinished = 0  # and aborted
        self.slots = asyncio.Semaphore(SLOTS)
        self.prompts: list[str] = []
        self.images: dict[str, str] = {}
        self.cached: set[tuple[str, str]] = set()
        self.draws = random.Random(0)
        self.updates, self.updated = 0, asyncio.Event()
        self.resumed = asyncio.Event()
        self.resumed.set()

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[str]:
        app = web.Application(client_max_size=1 << 24)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/metrics", self.metrics)
        app.router.add_post("/v1/chat/completions", self.chat)
        if "no updates" not in self.faults:
            app.router.add_get("/is_paused", self.is_paused)
            for path in ("/pause", "/resume", "/update_weights"):
                app.router.add_post(path, self.change)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.0)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        finally:
            await runner.cleanup()

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m", "max_model_len": CONTEXT}]})

    async def metrics(self, _: web.Request) -> web.Response:
        if "no metrics" in self.faults:
            raise web.HTTPNotFound
        counter = 'vllm:prompt_tokens_by_source_total{source="external_kv_transfer"}'
        text = f"vllm:num_requests_running {self.running}\n{counter} {self.handed_over}\n"
        return web.Response(text=text)

    async def change(self, request: web.Request) -> web.Response:
        """Pause, resume, or update the weights."""
        if request.path == "/update_weights":
            self.updates += 1
            self.updated.set()
            if "stale prefix" not in self.faults:
                self.cached.clear()
        elif request.path == "/resume":
            self.resumed.set()
        elif "pause ignored" not in self.faults:
            self.resumed.clear()
        return web.json_response({"weight_version": str(self.updates)})

    async def is_paused(self, _: web.Request) -> web.Response:
        return web.json_response({"is_paused": not self.resumed.is_set()})

    def spans(self, made: int, switched_at: int) -> list[Body]:
        """Return which weights sampled the tokens of an answer that were sampled before and after
        an update."""
        version = self.updates - ("old version" in self.faults)
        later = {"version": str(version), "worker": "w", "start": switched_at, "end": made}
        if "spans lost" in self.faults or not switched_at:
            return [later]
        return [{"version": "before", "worker": "w", "start": 0, "end": switched_at}, later]

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        await self.resumed.wait()
        self.requests += 1
        self.asked_tokens += body["max_tokens"] * body.get("n", 1)
        if refusal := self.refusal(body):
            status, message = refusal
            return web.json_response({"error": {"message": message}}, status=status)
        await self.slots.acquire()
        self.running += 1
        is_kept = "keeps aborted" in self.faults
        self.unfinished += 1
        try:
            answer = await self.answer(request, body)
            is_kept = False
            self.unfinished -= 1
            return answer
        finally:
            if not is_kept:
                self.running -= 1
                self.slots.release()

    def refusal(self, body: Body) -> tuple[int, str] | None:
        for name in ("logprobs", "seed", "tools", "n", "cache_salt", "response_format"):
            if name in body and f"no {name}" in self.faults:
                return 400, f"{name} is not supported"
        if "no images" in self.faults and isinstance(body["messages"][0]["content"], list):
            return 400, "images are not supported"
        if body.get("inference_geo") == NOWHERE and "region unknown" not in self.faults:
            return 503, "no worker is in no-such-region"
        if (length := len(prompt_of(body).split())) > CONTEXT and "any length" not in self.faults:
            if "length breaks" in self.faults:
                return 500, "prefill worker failed\x1b[2J to start"
            if "length unsaid" in self.faults:
                return 400, f"the limit is {CONTEXT} tokens"
            return 400, f"the prompt has {length} tokens, the limit is {CONTEXT}"
        return None

    def tokens(self, body: Body, index: int) -> list[str]:
        """Return the tokens of one answer."""
        prompt = prompt_of(body)
        if "response_format" in body and "schema ignored" not in self.faults:
            return list(CALL)
        content = body["messages"][0]["content"]
        if isinstance(content, list) and len(content) > 1:
            return [self.color(content[0]["image_url"]["url"], prompt)]
        if "earlier answer" in self.faults and prompt in self.prompts:
            prompt = self.prompts[-1]
        self.prompts.append(prompt_of(body))
        if "wrong after aborts" in self.faults and self.unfinished > self.running:
            prompt = "of an aborted request"
        choose = random.Random(hashlib.sha256(prompt.encode()).digest())
        if body["temperature"]:
            has_seed = "seed" in body and "seed ignored" not in self.faults
            choose = random.Random(f"{prompt}{body['seed']}{index}") if has_seed else self.draws
        tokens = [f"{choose.choice(WORDS)} " for _ in range(body["max_tokens"])]
        is_crowded = self.running > 1 and not body["temperature"]
        if is_crowded and {"wrong first", "near tie"} & self.faults:
            tokens[0] = "near " if "near tie" in self.faults else "Other "
        return tokens

    def color(self, url: str, text: str) -> str:
        if "one image" in self.faults:
            url = self.images.setdefault(text, url)
        is_red = url == solid_png(255, 0, 0) or "color blind" in self.faults
        if "images swapped" in self.faults and self.running > 1:
            is_red = not is_red
        names = ("Some", "Other") if "no colors" in self.faults else ("Blue", "Red")
        return names[is_red]

    def score(self, token: str) -> Body:
        """Return the logprobs of a token: likely, with "near" close to it, and a third."""
        chosen, near = math.log(0.5), math.log(0.45 if "near tie" in self.faults else 0.1)
        if "too likely" in self.faults:
            near = chosen - 0.001
        others = [("near ", near), ("far ", math.log(0.04))]
        if "too likely" in self.faults:
            others.append(("third ", near - 0.1))
            others.sort(key=lambda pair: -pair[1])
        top = [(token, chosen), *others]
        return {
            "token": token,
            "logprob": chosen,
            "top_logprobs": [{"token": name, "logprob": value} for name, value in top],
        }

    def choice(self, body: Body, index: int) -> tuple[list[str], str]:
        """Return the tokens of an answer that are shown, and why it ended."""
        tokens, reason = self.tokens(body, index), "length"
        if len(tokens) < body["max_tokens"]:
            reason = "stop"
        for string in body.get("stop") or []:
            text = "".join(tokens)
            if string in text and "stop ignored" not in self.faults:
                extra = len(string) - 1 if "stop leaks" in self.faults else 0
                tokens, reason = [text[: text.index(string) + extra]], "stop"
        return tokens, reason

    def usage(self, body: Body, made: int) -> Body:
        prompt, salt = prompt_of(body), body.get("cache_salt", "")
        length = len(prompt.split()) + 16 * ("image_url" in json.dumps(body["messages"]))
        if "image dropped" in self.faults:
            length = len(prompt.split())
        key = ("" if "salt ignored" in self.faults else salt, prompt)
        cached = length - 1 if key in self.cached or "all cached" in self.faults else 0
        self.cached.add(key)
        if "stream counts less" in self.faults and body.get("stream"):
            made -= 1
        return {
            "prompt_tokens": length,
            "completion_tokens": made,
            "total_tokens": length + made + ("wrong sum" in self.faults),
            "prompt_tokens_details": {"cached_tokens": cached},
            **self.region(body),
        }

    def region(self, body: Body) -> Body:
        if "no regions" in self.faults:
            return {}
        is_wrong = "region ignored" in self.faults and "inference_geo" in body
        return {"inference_geo": "here" if is_wrong else body.get("inference_geo", "there")}

    async def answer(self, request: web.Request, body: Body) -> web.StreamResponse:
        await asyncio.sleep(0)  # so that requests at once do run at once
        self.handed_over += "aggregated" not in self.faults
        count = 1 if "n ignored" in self.faults else body.get("n", 1)
        choices = [self.choice(body, index) for index in range(count)]
        made = sum(len(tokens) for tokens, _ in choices)
        if "stop" in body:
            made = 1
        usage = self.usage(body, made)
        events = [
            event
            for index, (tokens, reason) in enumerate(choices)
            for event in self.events(body, index, tokens, reason)
        ]
        if not body.get("stream"):
            whole = [merged(events, index) for index in range(count)]
            found: Body = {"choices": whole, "usage": usage}
            if self.updates and "no spans" not in self.faults:
                found["pdserve"] = {"receipt": {"spans": self.spans(made, 0)}}
            return web.json_response(found)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for number, event in enumerate(events):
            if number == 2 and "stream loses" in self.faults:
                continue
            await response.write(b"data: %s\n\n" % json.dumps({"choices": [event]}).encode())
            if number == 2 and body["max_tokens"] == 256:
                await asyncio.Event().wait()  # the client goes away
            if number == 2 and body["max_tokens"] == UPDATED_ANSWER_TOKENS:
                await self.updated.wait()
        last: Body = {"choices": [], "usage": usage}
        if self.updates:
            last["pdserve"] = {"receipt": {"spans": self.spans(made, 3)}}
        await response.write(b"data: %s\n\n" % json.dumps(last).encode())
        if "no end" not in self.faults:
            await response.write(b"data: [DONE]\n\n")
        return response

    def events(self, body: Body, index: int, tokens: list[str], reason: str) -> list[Body]:
        """Return an answer as the deltas of its stream."""
        found: list[Body] = []
        for token in CALL if "tools" in body else tokens:
            delta: Body = {"content": token}
            if "tools" in body:
                lost = "arguments lost" in self.faults and body.get("stream")
                call = {"name": None if found else "set_phase", "arguments": "" if lost else token}
                delta = {"tool_calls": [{"index": 0, "function": call}]}
            event: Body = {"index": index, "delta": delta}
            if body.get("logprobs") and "no scores" not in self.faults:
                is_lost = "first score lost" in self.faults and not found
                event["logprobs"] = {"content": [] if is_lost else [self.score(token)]}
            found.append(event)
        found[-1]["finish_reason"] = "tool_calls" if "tools" in body else reason
        return found


def prompt_of(body: Body) -> str:
    content = body["messages"][0]["content"]
    return content if isinstance(content, str) else str(content[-1]["text"])


def merged(events: list[Body], index: int) -> Body:
    """Return the whole choice of the deltas of one."""
    own = [event for event in events if event["index"] == index]
    message: Body = {"content": "".join(event["delta"].get("content", "") for event in own)}
    calls = [event["delta"]["tool_calls"][0] for event in own if "tool_calls" in event["delta"]]
    if calls:
        arguments = "".join(call["function"]["arguments"] for call in calls)
        message["tool_calls"] = [{"function": {"name": "set_phase", "arguments": arguments}}]
    scores = [x for event in own for x in event.get("logprobs", {}).get("content", [])]
    reason = own[-1]["finish_reason"]
    return {
        "index": index,
        "message": message,
        "finish_reason": reason,
        "logprobs": {"content": scores} if scores else None,
    }


@asynccontextmanager
async def endpoint_of(server: Server, **options: Any) -> AsyncIterator[Endpoint]:
    async with (
        server.serve() as url,
        Endpoint.connect(
            url, key="", tls=True, **{"concurrency": SLOTS, "weights": "/w", **options}
        ) as endpoint,
    ):
        await endpoint.discover()
        yield endpoint


async def outcome(name: str, *faults: str, **options: Any) -> Outcome:
    async with endpoint_of(Server(*faults), **{"timeout_s": WAIT_S, **options}) as endpoint:
        return (await run_check(endpoint, BY_NAME[name])).outcome


@pytest.mark.parametrize("name", BY_NAME)
async def test_an_honest_endpoint_passes_each_check_at_the_cost_that_is_stated(name: str) -> None:
    server, check = Server(), BY_NAME[name]
    async with endpoint_of(server, timeout_s=WAIT_S) as endpoint:
        requests, tokens = server.requests, server.asked_tokens
        result = await run_check(endpoint, check)
    assert isinstance(result.outcome, Passed), result
    most_requests, most_tokens = check.cost(SLOTS)
    assert server.requests - requests <= most_requests
    assert server.asked_tokens - tokens <= most_tokens


FAULTS = [
    ("stream", "stream loses", "character"),
    ("stream", "no end", "[DONE]"),
    ("repeat", "earlier answer", "equal requests differ"),
    ("seed", "seed ignored", "seeds"),
    ("usage", "wrong sum", "total_tokens"),
    ("usage", "stream counts less", "another usage"),
    ("usage", "all cached", "cached"),
    ("stop", "stop leaks", "expected"),
    ("stop", "stop ignored", "has the stop string"),
    ("logprobs", "first score lost", "the tokens make"),
    ("logprobs", "too likely", "sum to"),
    ("structured", "schema ignored", "not JSON"),
    ("tools", "arguments lost", "arguments are not JSON"),
    ("choices", "n ignored", "asked for 3 answers"),
    ("abort", "keeps aborted", "not done within"),
    ("storm", "wrong after aborts", "aborts equal requests differ"),
    ("residency", "region ignored", "was answered in 'here'"),
    ("residency", "region unknown", "bound to 'no-such-region' was answered"),
    ("length", "any length", "accepted"),
    ("length", "length unsaid", "without its length"),
    ("length", "length breaks", "HTTP 500: prefill worker failed [2J to start"),
    ("concurrency", "wrong first", "at character 0"),
    ("images", "one image", "the blue image is called red"),
    ("images", "images swapped", "image is called"),
    ("images", "image dropped", "adds no tokens"),
    ("salt", "salt ignored", "another salt"),
    ("disaggregation", "aggregated", "no sign of a hand-over"),
    ("stale_prefix", "stale prefix", "from before the update to 1"),
    ("versions", "spans lost", "the spans of 128 tokens are 3 to 128"),
    ("versions", "old version", "after the update to 1 tokens are of 0"),
    ("pause", "pause ignored", "a request was answered"),
]


def test_each_check_has_a_planted_fault() -> None:
    assert {name for name, _, _ in FAULTS} == set(BY_NAME)


@pytest.mark.parametrize(("name", "fault", "shown"), FAULTS)
async def test_a_planted_fault_is_found_and_shown(name: str, fault: str, shown: str) -> None:
    limit = SOON_S if name == "abort" else WAIT_S
    found = await outcome(name, fault, timeout_s=limit, is_claimed=True)
    assert isinstance(found, CheckFailed), found
    assert shown in found.what
    assert found.answers
    assert all(answer.shown()["request"]["messages"] for answer in found.answers)


async def test_slots_that_metrics_show_as_taken_are_a_failure() -> None:
    server = Server()
    async with endpoint_of(server, timeout_s=POLLED_S) as endpoint:
        metrics = endpoint.metrics
        server.faults.add("keeps aborted")
        server.slots = asyncio.Semaphore(100)
        found = (await run_check(endpoint, BY_NAME["abort"])).outcome
        assert (await metrics())["vllm:num_requests_running"] == 2 * SLOTS
    assert isinstance(found, CheckFailed), found
    assert f"after {2 * SLOTS} aborts vllm:num_requests_running is {2 * SLOTS}" in found.what


async def test_answers_that_part_at_a_near_tie_are_no_failure() -> None:
    assert isinstance(await outcome("concurrency", "near tie"), Passed)


@pytest.mark.parametrize("fault", ["no logprobs", "no scores"])
async def test_without_logprobs_a_difference_is_undecided_unless_it_comes_again(fault: str) -> None:
    found = await outcome("concurrency", "wrong first", fault)
    assert isinstance(found, NotApplicable), found
    assert "rounding" in found.why
    assert isinstance(await outcome("stream", "stream loses", fault), CheckFailed)


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("seed", "no seed"),
        ("logprobs", "no logprobs"),
        ("structured", "no response_format"),
        ("tools", "no tools"),
        ("choices", "no n"),
        ("images", "no images"),
        ("salt", "no cache_salt"),
        ("disaggregation", "aggregated"),
        ("residency", "no regions"),
        ("stale_prefix", "no updates"),
        ("versions", "no updates"),
        ("versions", "no spans"),
        ("pause", "no updates"),
    ],
)
async def test_checks_of_features_that_an_endpoint_lacks_are_not_applicable(
    name: str, fault: str
) -> None:
    assert isinstance(await outcome(name, fault), NotApplicable)


async def test_a_model_is_not_updated_unless_a_checkpoint_is_named() -> None:
    server = Server()
    async with endpoint_of(server, timeout_s=WAIT_S, weights="") as endpoint:
        for name in ("stale_prefix", "versions", "pause"):
            found = (await run_check(endpoint, BY_NAME[name])).outcome
            assert isinstance(found, NotApplicable), found
            assert "--weights" in found.why
    assert not server.updates


async def test_images_are_checked_with_a_model_that_names_no_colors() -> None:
    found = await outcome("images", "no colors")
    assert isinstance(found, Passed), found
    assert "names no colors" in found.note
    swapped = await outcome("images", "no colors", "images swapped")
    assert isinstance(swapped, CheckFailed), swapped
    assert "image is that to the" in swapped.what
    blind = await outcome("images", "color blind")
    assert isinstance(blind, NotApplicable), blind
    assert "alike" in blind.why


async def test_without_metrics_an_abort_is_judged_by_later_answers() -> None:
    found = await outcome("abort", "no metrics")
    assert isinstance(found, Passed)
    assert "no /metrics" in found.note


async def command(*words: str) -> int:
    args = build_parser().parse_args(["verify", *words])
    code: int = await args.handler(args)
    return code


async def test_the_command_prints_a_table_and_its_exit_code_says_what_holds(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with Server("no images").serve() as url:
        assert await command(url, "--only", "stream,images", "--concurrency", "2") == 0
        shown = capsys.readouterr()
        assert await command(url, "--only", "images") == 2, "nothing could be checked"
    rows = {line.split()[0]: line for line in shown.out.splitlines() if line.strip()}
    assert "holds" in rows["stream"]
    assert "not applicable" in rows["images"]
    assert "2 checks of m ask for 448 tokens of answers at most, in 14 requests" in shown.err
    assert "[1/2] stream" in shown.err


async def test_a_failure_shows_requests_and_answers(capsys: pytest.CaptureFixture[str]) -> None:
    async with Server("stream loses").serve() as url:
        assert await command(url, "--only", "stream") == 1
        table = capsys.readouterr().out
        assert await command(url, "--skip", ",".join(BY_NAME.keys() - {"stream"}), "--json") == 1
    assert BY_NAME["stream"].link in table
    (shown,) = json.loads(capsys.readouterr().out)["checks"]
    assert shown["result"] == "fails"
    whole, streamed = shown["evidence"]
    assert streamed["request"]["stream"]
    assert whole["request"]["messages"] == streamed["request"]["messages"]
    assert whole["choices"][0]["text"] != streamed["choices"][0]["text"]


async def test_an_unreachable_endpoint_exits_with_2(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert await command("http://127.0.0.1:1") == 2
    assert "cannot check http://127.0.0.1:1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("--only", "magic"), "there is no check 'magic'; there are stream, repeat,"),
        (("--concurrency", "0"), "must be at least 1"),
    ],
)
async def test_wrong_options_are_refused_by_name(words: tuple[str, ...], error: str) -> None:
    with pytest.raises(ConfigError, match=f"{words[0]}.*{error}"):
        await command(*words)


async def test_an_interrupt_shows_the_results_so_far() -> None:
    async with Server("no metrics", "keeps aborted").serve() as url:
        words = ("verify", url, "--only", "stream,abort", "--concurrency", str(SLOTS))
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "pdserve",
            *words,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert process.stderr is not None
        async with asyncio.timeout(WAIT_S):
            seen = []
            while not (seen or [b""])[-1].startswith(b"[2/2] abort"):
                seen.append(await process.stderr.readline())
        assert seen[-2].startswith(b"    holds in ")
        async with asyncio.timeout(WAIT_S):
            process.send_signal(signal.SIGINT)
            out, errors = await process.communicate()
    assert process.returncode == 130
    assert "holds" in out.decode()
    assert "Traceback" not in errors.decode()


def test_the_document_has_each_check_as_it_is() -> None:
    rows = [f"| `{x.name}` | {x.promise} | [{x.guards_against}]({x.link}) |" for x in CHECKS]
    assert "\n".join(rows) in Path(ROOT, "docs/verify.md").read_text(encoding="utf-8")
