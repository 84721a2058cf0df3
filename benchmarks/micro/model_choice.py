"""Quality against cost of a virtual model: at which mean logprob a cheap answer is kept.

One service has the demo model and SmolLM2-135M-Instruct, one core each. For each threshold a
virtual model has the demo model answer, and escalates to SmolLM2. Half of the questions are about
serving, which the demo model learned; the others are general. An answer counts if it has the
expected word. Decoding is greedy. Cost is engine time times price, of both models if it escalates.
"""

from __future__ import annotations

import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from benchmarks.errors import BenchError
from benchmarks.service import LocalService
from pdserve.client import ChatMessage, Client
from pdserve.errors import PdserveError
from pdserve.types import SamplingParams

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

    from benchmarks.progress import Progress

CHEAP, STRONG = "pdserve-demo", "smollm2"
# Questions, each with the words of which a right answer has one.
QUESTIONS: Final[Mapping[str, str]] = {
    "What is prefill?": "first phase",
    "What is decode?": "second phase",
    "What is the KV cache?": "keys and values",
    "What is a KV block?": "fixed number",
    "What is TTFT?": "time to first token",
    "What is TPOT?": "time per output token",
    "Why does prefill matter?": "waits|wait for",
    "Why does decode matter?": "pace",
    "How does prefill work?": "parallel",
    "How is TTFT measured?": "moment",
    "What does pdserve do?": "separate workers",
    "Why separate prefill and decode?": "compute",
    "What is disaggregated serving?": "different workers",
    "How does the KV cache move?": "reserves",
    "What happens to a request?": "five steps",
    "Explain disaggregated serving in detail": "two phases",
    "What is the capital of France?": "paris",
    "What is the capital of Japan?": "tokyo",
    "What is the capital of Italy?": "rome",
    "Which planet is called the red planet?": "mars",
    "What is the largest planet in our solar system?": "jupiter",
    "How many days are in a week?": "seven|7",
    "How many legs does a spider have?": "eight|8",
    "Who wrote Romeo and Juliet?": "shakespeare",
    "What color is the sky on a clear day?": "blue",
    "What is the opposite of hot?": "cold",
    "What is H2O commonly called?": "water",
    "Which language is spoken in Brazil?": "portuguese",
    "On which continent is Egypt?": "africa",
    "What is the fastest land animal?": "cheetah",
    "At how many degrees Celsius does water boil?": "100",
    "What is 2 + 2?": "4|four",
}


class _Asked(NamedTuple):
    """`cost`: of both models."""

    is_right: bool
    escalated: bool
    cost: float
    seconds: float


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--thresholds",
        default="-0.04,-0.02,-0.01,-0.004,-0.001",
        metavar="L,...",
        help="mean logprobs",
    )
    parser.add_argument("--held", type=int, default=24, metavar="N", help="held tokens (24)")
    parser.add_argument("--tokens", type=int, default=64, metavar="N", help="of an answer (64)")


async def run(
    args: argparse.Namespace, progress: Progress
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return a row for each threshold, and for each model alone. Raises BenchError."""
    thresholds = args.thresholds.split(",")
    names = [CHEAP, *thresholds, STRONG]
    found: dict[str, list[list[_Asked]]] = {name: [] for name in names}
    async with AsyncExitStack() as ending:
        folder = ending.enter_context(tempfile.TemporaryDirectory(prefix="pdserve-bench-"))
        service = LocalService("two models", _config(thresholds, args.held), Path(folder))
        ending.push_async_callback(service.stop)
        progress.step("starting two models")
        await service.start()
        client = await ending.enter_async_context(Client(service.ready["grpc"]))
        for name in (CHEAP, STRONG):  # which warms up, and gives the cost model its measurements
            progress.step(f"warming up {name}")
            for question in [*QUESTIONS][::4]:
                await _ask(client, name, question, args.tokens)
        for number in range(args.rounds):
            # Each round begins with another one, so that none is always first.
            for name in (*names[number % len(names) :], *names[: number % len(names)]):
                progress.step(f"round {number + 1} of {args.rounds}, {name}")
                asked = [await _ask(client, name, x, args.tokens) for x in QUESTIONS]
                found[name].append(asked)
    strong = _cost(found[STRONG])
    rows = [
        {
            "kept from": f"{name} alone" if name in (CHEAP, STRONG) else name,
            "right": f"{median(sum(x.is_right for x in each) for each in rounds):g} of "
            f"{len(QUESTIONS)}",
            "escalated %": 100 * fmean(x.escalated for each in rounds for x in each),
            f"cost, {STRONG} = 1": _cost(rounds) / strong,
            "seconds, mean": median(fmean(x.seconds for x in each) for each in rounds),
        }
        for name, rounds in found.items()
    ]
    return rows, []


def _config(thresholds: Sequence[str], held: int) -> dict[str, Any]:
    one = {"prefill": {"workers": 0}, "decode": {"workers": 0}, "aggregated": {"workers": 1}}
    check = {"to": STRONG, "tokens": held, "timeout_s": 60.0}
    virtual = []
    for name in thresholds:
        escalate = {**check, "min_mean_logprob": float(name)}
        rule = {"name": "cheap", "model": CHEAP, "escalate": escalate}
        virtual.append({"name": name, "default": STRONG, "rules": [rule]})
    return {
        "router": {
            "http": {"port": 0},
            "grpc": {"port": 0},
            "prices": {"cpu": 1.0},
            "virtual_models": virtual,
        },
        "worker": {"engine_args": {"max_num_seqs": 8, "kv_cache_memory_bytes": 256 << 20}},
        "up": {
            "models": [{"model": "demo", **one}, {"model": "smollm2", **one}],
            "cores_per_worker": 1,
        },
    }


async def _ask(client: Client, model: str, question: str, tokens: int) -> _Asked:
    sampling = SamplingParams(max_tokens=tokens, temperature=0.0)
    text, began, receipt = "", time.perf_counter(), None
    try:
        async for delta in client.generate([ChatMessage("user", question)], sampling, model=model):
            text, receipt = text + delta.text, delta.receipt or receipt
    except PdserveError as error:
        raise BenchError(f"{model}: {error}") from None
    if receipt is None or receipt.cost is None:
        raise BenchError(f"{model}: an answer has no cost")
    choice, cost = receipt.model_choice, receipt.cost
    discarded = choice is not None and bool(choice.discarded_model)
    if choice is not None and discarded:
        if choice.discarded_cost is None:
            raise BenchError(f"{model}: the cost of a discarded answer is not known")
        cost += choice.discarded_cost
    is_right = any(x in text.lower() for x in QUESTIONS[question].split("|"))
    return _Asked(is_right, discarded, cost, time.perf_counter() - began)


def _cost(rounds: Sequence[Sequence[_Asked]]) -> float:
    return median(sum(x.cost for x in each) for each in rounds)
