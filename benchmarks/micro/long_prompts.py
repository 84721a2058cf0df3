"""TTFT that a router adds to long prompts, and its CPU time, compared with other routers. Each of
`--clients` chats has one prompt of `--bytes` and, after each answer of one token, another turn that
adds 3 KB. `first` is the first turn, sent by all clients at once; `later` are the following turns,
sequential for each client. Routers and servers are the same as in `router`: pdserve renders and
tokenises once, while each server of vllm-router must tokenise by itself, which these mock servers
do not. `direct` is the mock server without a router. With `--token-ids` prompts have token ids,
about one for every 5 bytes of `--bytes`, so no router tokenises. A router adds its median TTFT
minus the median of `direct`.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks.client import HttpTarget, Request
from benchmarks.errors import BenchError, TargetError
from benchmarks.micro.router import add_routers_option, chosen_routers, running
from benchmarks.service import processor_s
from benchmarks.stats import alternate, compare, percentiles
from pdserve.errors import ConfigError
from pdserve.model.hub import model_directory

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable

    from benchmarks.progress import Progress

TIMEOUT_S: Final = 240.0
MAX_MODEL_LEN: Final = 1 << 20
NEW_BYTES: Final = 2000  # size of the user's message in each turn
ANSWER_BYTES: Final = 1000
_CHAT, _COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_BYTES_OF_ID = 5  # bytes of text per token id, for `--token-ids`
_WORDS = (
    "the file has a function that returns its value if the test fails because of an error in line "
    "import self def class return None True async await for while with open read write path index "
    "request response token block cache router worker prefill decode model tenant session latency"
)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--clients", default="20,200", metavar="N,...", help="at once (20,200)")
    parser.add_argument("--bytes", type=int, default=220_000, metavar="N", help="(220000)")
    parser.add_argument("--token-ids", action="store_true", help="prompts of as many token ids")
    parser.add_argument("--turns", type=int, default=4, metavar="N", help="of each client (4)")
    add_routers_option(parser)
    parser.add_argument(
        "--model", default="smollm2", help="pdserve's tokenizer: a model as in worker.model"
    )


async def run(
    args: argparse.Namespace, progress: Progress
) -> tuple[list[dict[str, Any]], list[str]]:
    """Measure all routers in turn. Return rows and notes. Raises BenchError."""
    names, notes = chosen_routers(args.only)
    counts = [int(x) for x in args.clients.split(",")]

    async def measure(name: str, number: int) -> dict[int, dict[str, float]]:
        found = {}
        for clients in counts:
            progress.step(f"round {number + 1} of {args.rounds}: {name}, {clients} clients")
            with tempfile.TemporaryDirectory(prefix="pdserve-bench-") as directory:
                found[clients] = await _measure(name, Path(directory), clients, args)
        return found

    rounds = [x async for x in alternate(names, args.rounds, measure, warm_up=False)]
    rows: list[dict[str, Any]] = []
    for clients in counts:
        for name in names:
            row: dict[str, Any] = {"router": name, "clients": clients}
            for metric in rounds[0][name][clients]:
                values = [{n: x[n][clients][metric] for n in names} for x in rounds]
                row[metric], _ = compare(values, names[0])[name]
            rows.append(row)
    return rows, notes


async def _measure(
    name: str, folder: Path, clients: int, args: argparse.Namespace
) -> dict[str, float]:
    blocks = clients * (2 + args.bytes // 16)
    worker = {"model": str(_model(args.model, folder)), "model_names": ["mock"]}
    engine = {"step_s": 0.001, "max_num_seqs": clients + 16, "total_blocks": blocks}
    async with running(name, folder, engine, worker) as router:
        client, model = HttpTarget(router.url), router.model
        turns_of, path = (_ids_of, _COMPLETIONS) if args.token_ids else (_turns_of, _CHAT)
        chats = [turns_of(f"{i}", args.bytes, args.turns, model) for i in range(clients)]
        found: dict[str, float] = {}
        try:
            await _ask(client, model, path, [turns_of("warm-up", args.bytes, 1, model)])
            for kind, which in (("first", slice(1)), ("later", slice(1, None))):
                cpu_s, begun = processor_s([router.pid]), time.monotonic()
                ttfts_s = await _ask(client, model, path, [x[which] for x in chats])
                took_s, cpu_s = time.monotonic() - begun, processor_s([router.pid]) - cpu_s
                p50_s, p99_s = percentiles(ttfts_s, 50, 99)
                found |= {
                    f"{kind}: p50_ms": p50_s * 1e3,
                    f"{kind}: p99_ms": p99_s * 1e3,
                    f"{kind}: cpu_ms": cpu_s / len(ttfts_s) * 1e3,
                    f"{kind}: requests_per_s": len(ttfts_s) / took_s,
                }
            return found
        except TargetError as error:
            raise BenchError(f"{name} failed a request: {error}") from None
        except TimeoutError:
            raise BenchError(f"{name}: not finished after {TIMEOUT_S:g} s") from None
        finally:
            await client.aclose()


def _model(name: str, folder: Path) -> Path:
    """Return a model directory with a model's tokenizer and a context that is long enough."""
    try:
        source = model_directory(name)
    except ConfigError as error:
        raise BenchError(f"--model: {error}") from None
    values = json.loads((source / "config.json").read_bytes())
    values = values.get("text_config", values) | {"max_position_embeddings": MAX_MODEL_LEN}
    target = folder / "model"
    target.mkdir()
    (target / "config.json").write_text(json.dumps(values), "utf-8")
    for each in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (source / each).is_file():
            shutil.copy(source / each, target)
    return target


def _turns_of(name: str, size: int, turns: int, model: str) -> list[bytes]:
    """Return the bodies of the turns of a chat, whose messages are random words. Built in advance,
    outside of the measured time."""
    chance = random.Random(name)
    messages: list[dict[str, str]] = []

    def say(role: str, size: int) -> None:
        text = " ".join(chance.choices(_WORDS.split(), k=size // 5))
        messages.append({"role": role, "content": text[:size].ljust(size, ".")})

    for _ in range(size // (NEW_BYTES + ANSWER_BYTES)):
        say("user", NEW_BYTES)
        say("assistant", ANSWER_BYTES)
    bodies = []
    for _ in range(turns):
        say("user", NEW_BYTES)
        body = {"model": model, "messages": messages, "max_tokens": 1, "stream": True}
        bodies.append(json.dumps(body).encode())
        say("assistant", ANSWER_BYTES)
    return bodies


def _ids_of(name: str, size: int, turns: int, model: str) -> list[bytes]:
    """Return the bodies of the turns of a conversation in random token ids."""
    chance, prompt = random.Random(name), list[int]()
    bodies = []
    for turn in range(turns):
        more = NEW_BYTES + ANSWER_BYTES if turn else size
        prompt += chance.choices(range(1000, 49_000), k=more // _BYTES_OF_ID)
        body = {"model": model, "prompt": prompt, "max_tokens": 1, "stream": True}
        bodies.append(json.dumps(body).encode())
    return bodies


async def _ask(
    client: HttpTarget, model: str, path: str, chats: Iterable[Iterable[bytes]]
) -> list[float]:
    """Take the turns of all chats. Return the seconds from sending to the first token of each."""
    found: list[float] = []

    async def one(bodies: Iterable[bytes]) -> None:
        for body in bodies:
            request = Request("", model, body, path=path)
            begun, ttft_s = time.monotonic(), 0.0
            async for _ in client.stream(request):
                ttft_s = ttft_s or time.monotonic() - begun
            found.append(ttft_s)

    async with asyncio.timeout(TIMEOUT_S):
        await asyncio.gather(*map(one, chats))
    return found
