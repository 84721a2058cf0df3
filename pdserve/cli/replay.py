"""`pdserve replay`: ask a service for the answer of an incident capsule again, and compare.

The request goes to POST /inference/v1/generate, which takes and returns token ids: neither a
tokenizer nor a chat template can differ.
"""

from __future__ import annotations

import json
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from msgspec import Struct

from pdserve.cli.options import (
    DEFAULT_URL,
    add_command,
    add_dial_options,
    add_seconds,
    api_key_from,
    http_tls_from,
    say,
)
from pdserve.config import refuse
from pdserve.errors import Unavailable, printable
from pdserve.observe.capsules import unseal
from pdserve.security.files import read_tokens

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Sequence

    import aiohttp

    from pdserve.cli.options import Subparsers
    from pdserve.observe.capsules import Capsule, CapsuleAnswer

SAME, DIFFERENT, FAILS, UNDECIDED = "same", "different", "fails", "undecided"
EXIT_CODES = {SAME: 0, DIFFERENT: 3, FAILS: 4, UNDECIDED: 5}
_PATH = "/inference/v1/generate"
_TOP_LOGPROBS = 20
_CONSTRAINTS = ("json_schema", "json_object", "regex", "choice", "grammar")


def register(commands: Subparsers) -> None:
    parser = add_command(
        commands,
        "replay",
        _run,
        "repeat the request of an incident capsule, and compare the answers",
        "Send the request of a capsule to a service with the same model, and compare token by "
        "token: with the right answer if the capsule has one, else with the answer that was sent. "
        "Exit codes: 0 same, 3 different, 4 the service fails to answer, 5 undecided (no prompt in "
        "the capsule, sampling without a seed, a near-tie); 1 and 2 as usual.",
    )
    parser.add_argument("capsule", metavar="CAPSULE", type=Path, help="file of `pdserve capsule`")
    parser.add_argument(
        "--url", default=DEFAULT_URL, help="address of the HTTP API (default: %(default)s)"
    )
    parser.add_argument("--model", default="", help="name of the model there; default: the same")
    parser.add_argument("--key-file", metavar="FILE", default="", help="router.capsules.key_file")
    parser.add_argument(
        "--times", type=int, default=3, metavar="N", help="requests (default: %(default)s)"
    )
    add_seconds(parser, "--timeout", 600.0, "timeout of a request")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_dial_options(parser)


class Difference(Struct, frozen=True):
    """The first token that differs, of the answer `index`; None: there is none. `got` is "" where
    the replay ended, `want` where it should have ended."""

    index: int
    token: int
    got: int | None
    want: int | None


class Repeated(Struct, kw_only=True):
    """One replay. `workers`: that prefilled and decoded. `sampled_by`: the worker of the token that
    differs."""

    result: str
    difference: Difference | None = None
    error: str = ""
    workers: tuple[str, ...] = ()
    transport: str = ""
    versions: tuple[str, ...] = ()
    sampled_by: str = ""


class ReplayVerdict(Struct, kw_only=True):
    """`compared_with`: the "expected" or the "sent" answer. `tokens`: how many could be compared.
    `worker`: that the evidence points to, "" for none. `points_to`: what it says, the most likely
    first."""

    result: str
    request_id: str
    compared_with: str
    tokens: int = 0
    difference: Difference | None = None
    worker: str = ""
    blocks: str = ""
    points_to: list[str] = []
    replays: list[Repeated] = []


class _Answered(NamedTuple):
    tokens: dict[int, list[int]]
    receipt: dict[str, Any]
    versions: dict[int, list[dict[str, Any]]]


class _Failed(Exception):
    """The service refused or failed the request."""


async def _run(args: argparse.Namespace) -> int:
    if args.times < 1:
        refuse("--times", f"must be at least 1, not {args.times}")
    secrets = read_tokens(args.key_file, "--key-file") if args.key_file else ()
    try:
        data = args.capsule.read_bytes()
    except OSError as error:
        refuse("CAPSULE", f"cannot read {args.capsule}: {error.strerror}")
    verdict = await _replayed(args, unseal(data, secrets, "--key-file"))
    if args.json:
        say(msgspec.json.encode(verdict).decode())
    else:
        show(verdict)
    return EXIT_CODES[verdict.result]


async def _replayed(args: argparse.Namespace, capsule: Capsule) -> ReplayVerdict:
    import aiohttp

    if why := not_repeatable(capsule):
        return verdict_of(capsule, [], [f"it cannot be replayed: {x}" for x in why])
    key = api_key_from(args)
    async with aiohttp.ClientSession(
        headers={"Authorization": f"Bearer {key}"} if key else {},
        connector=aiohttp.TCPConnector(ssl=http_tls_from(args)),
        timeout=aiohttp.ClientTimeout(total=args.timeout),
    ) as http:
        url = args.url.rstrip("/").removesuffix("/v1") + _PATH
        body = body_of(capsule, args.model)
        replays = [await _repeat(http, url, body, capsule) for _ in range(args.times)]
    return verdict_of(capsule, replays)


async def _repeat(
    http: aiohttp.ClientSession, url: str, body: dict[str, Any], capsule: Capsule
) -> Repeated:
    try:
        answered = await _post(http, url, body)
        found = compared(capsule, answered.tokens, answered.receipt, answered.versions)
        if found.difference is not None and await _is_tie(http, url, body, capsule, found):
            found.result = UNDECIDED
            found.error = "the two tokens are about equally likely: rounding may decide"
    except _Failed as error:
        return Repeated(result=FAILS, error=str(error))
    return found


async def _post(http: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> _Answered:
    """Raises _Failed, and Unavailable if there is no service."""
    import aiohttp

    try:
        async with http.post(url, json=body) as response:
            text = await response.read()
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise Unavailable(f"no answer from {url}: {error or type(error).__name__}") from error
    try:
        found = json.loads(text)
        if response.status >= 400:
            why = found["error"]
            raise _Failed(printable(f"{why.get('code')}: {why.get('message')}"))
        choices = {x["index"]: x for x in found["choices"]}
        receipt = (found.get("pdserve") or {}).get("receipt") or {}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise _Failed(f"HTTP {response.status} without an answer that can be read") from None
    return _Answered(
        {index: x["token_ids"] for index, x in choices.items()},
        receipt,
        {index: x.get("weight_versions") or [] for index, x in choices.items()},
    )


async def _is_tie(
    http: aiohttp.ClientSession, url: str, body: dict[str, Any], capsule: Capsule, found: Repeated
) -> bool:
    """Return True if, after the same tokens, the service gives the token that it sampled and the
    one that it should have sampled logprobs within TIE. Only greedy answers have such ties."""
    from pdserve.cli.verify.compare import TIE

    difference = found.difference
    if capsule.sampling["temperature"] or difference is None or capsule.prompt is None:
        return False
    want = _want(next(x for x in capsule.answers if x.index == difference.index))
    one = {"max_tokens": 1, "min_tokens": 0, "n": 1, "logprobs": _TOP_LOGPROBS}
    asked = {**body, "sampling_params": {**body["sampling_params"], **one}}
    asked["token_ids"] = [*capsule.prompt, *want[: difference.token]]
    try:
        async with http.post(url, json=asked) as response:
            choice = json.loads(await response.read())["choices"][0]
        (position,) = choice["logprobs"]["content"]
        scores = {x["token_id"]: x["logprob"] for x in (position, *position["top_logprobs"])}
        return bool(abs(scores[difference.got] - scores[difference.want]) <= TIE)
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return False  # without logprobs of both nothing excuses the difference


def not_repeatable(capsule: Capsule) -> list[str]:
    """Return why a replay could not tell anything."""
    sampling, found = capsule.sampling, list(capsule.unlike)
    if capsule.prompt is None:
        found.append("it has no prompt (router.capsules.prompts)")
    if sampling["temperature"] and sampling.get("seed") in (None, -1):
        found.append("the answer was sampled without a seed")
    constraint = (sampling.get("structured_output") or {}).get("kind", "json_object")
    if constraint not in _CONSTRAINTS:
        found.append(f"a constraint of the kind {constraint} cannot be sent")
    if not (capsule.header.code or any(_want(x) for x in capsule.answers)):
        found.append("no token was sent, so there is nothing to compare")
    return found


def body_of(capsule: Capsule, model: str = "") -> dict[str, Any]:
    """Return the request for POST /inference/v1/generate, with every sampling parameter: the
    defaults of the service may be others."""
    params = {k: x for k, x in capsule.sampling.items() if x is not None}
    for name in ("prompt_logprobs", "logprobs", "routed_experts"):
        params.pop(name, None)
    if constraint := params.pop("structured_output", None):
        kind, value = constraint["kind"], constraint.get("value", "")
        special = {
            "json_schema": {"json": value},
            "json_object": {"json_object": True},
            "choice": {"choice": constraint.get("choices")},
        }
        params["structured_outputs"] = special.get(kind, {kind: value})
    name = model or capsule.header.model
    return {"model": name, "token_ids": capsule.prompt, "sampling_params": params}


def _want(answer: CapsuleAnswer) -> list[int]:
    return answer.tokens if answer.expected is None else answer.expected


def compared(
    capsule: Capsule,
    tokens: dict[int, list[int]],
    receipt: dict[str, Any],
    versions: dict[int, list[dict[str, Any]]],
) -> Repeated:
    """Compare one replay with the capsule. Of an answer that did not end, only the tokens that were
    sent are compared, and of a part of the expected one only that part."""
    first = None
    for answer in capsule.answers:
        want, got = _want(answer), tokens.get(answer.index, [])
        is_whole = bool(answer.finish_reason) if answer.expected is None else True
        if not is_whole or answer.expected_is_part:
            got = got[: len(want)]
        pairs = enumerate(zip_longest(got, want))
        at = next((i for i, (x, y) in pairs if x != y), None)
        if at is not None and (first is None or at < first.token):
            ends = [x[at] if at < len(x) else None for x in (got, want)]
            first = Difference(answer.index, at, *ends)
    prefill, decode = receipt.get("prefill_worker", ""), receipt.get("decode_worker", "")
    sampled_by = ""
    if first is not None:
        spans = versions.get(first.index, [])
        named = (x.get("worker") for x in spans if x["start"] <= first.token < x["end"])
        sampled_by = next(filter(None, named), "")
        sampled_by = sampled_by or (decode if first.token and decode else prefill)
    return Repeated(
        result=SAME if first is None else DIFFERENT,
        difference=first,
        workers=tuple(dict.fromkeys(x for x in (prefill, decode) if x)),
        transport=receipt.get("transport", ""),
        versions=tuple(dict.fromkeys(x["version"] for y in versions.values() for x in y)),
        sampled_by=sampled_by,
    )


def verdict_of(
    capsule: Capsule, replays: list[Repeated], why_not: Sequence[str] = ()
) -> ReplayVerdict:
    """Return what all replays together say. One difference is enough: the service gave a wrong
    token."""
    results = {x.result for x in replays}
    order = (DIFFERENT, FAILS, UNDECIDED, SAME)
    verdict = ReplayVerdict(
        result=next((x for x in order if x in results), UNDECIDED),
        request_id=capsule.header.request_id,
        compared_with="sent" if all(x.expected is None for x in capsule.answers) else "expected",
        tokens=sum(len(_want(x)) for x in capsule.answers),
        points_to=list(why_not),
        replays=replays,
    )
    if differ := [x for x in replays if x.result == DIFFERENT]:
        firsts = [x.difference for x in differ if x.difference is not None]
        verdict.difference = min(firsts, key=lambda x: x.token)
        verdict.points_to += _suspects(differ, [x for x in replays if x.result == SAME])
        verdict.worker = _only(x.sampled_by for x in differ)
        verdict.blocks, texts = _blocks(capsule, differ[0])
        verdict.points_to += texts
    worker, texts = _of_incident(capsule)
    verdict.worker = verdict.worker or worker
    verdict.points_to += texts
    errors = dict.fromkeys(x.error for x in replays if x.error)
    verdict.points_to += errors
    if capsule.header.code and any(x.startswith(f"{capsule.header.code}:") for x in errors):
        verdict.points_to.append(f"the failure repeats: {capsule.header.code}")
    return verdict


def _only(names: Iterable[str]) -> str:
    found = set(names)
    return found.pop() if len(found) == 1 else ""


def _suspects(differ: list[Repeated], same: list[Repeated]) -> list[str]:
    """Return the workers, and the pair, that all wrong answers of the replay used and no right
    one."""
    sound = {x for y in same for x in y.workers}
    shared = set.intersection(*(set(x.workers) for x in differ)) - sound
    sampler = _only(x.sampled_by for x in differ)
    found = [
        f"worker {name}: all {len(differ)} answers that differ used it, and none of "
        f"{len(same)} that are the same" + (", and it sampled the token" if name == sampler else "")
        for name in sorted(shared, key=lambda x: (x != sampler, x))
    ]
    pairs = {x.workers for x in differ if len(x.workers) == 2}
    if not shared and len(pairs) == 1 and pairs.isdisjoint(x.workers for x in same):
        prefill, decode = pairs.pop()
        found.append(f"the link {prefill} to {decode}: each of them alone gave the right answer")
    return found or ["no single worker: those of wrong answers also gave right ones"]


def _blocks(capsule: Capsule, wrong: Repeated) -> tuple[str, list[str]]:
    """Return the KV blocks that the token which differs was sampled from, as "first-last", and
    what that says. Empty if the router knew no block size."""
    sizes = {x.get("block_size", 0) for x in capsule.workers.values()} - {0}
    difference = wrong.difference
    if not sizes or difference is None:
        return "", []
    size = min(sizes)
    last = max(0, capsule.prompt_tokens + difference.token - 1) // size
    prompt = (capsule.prompt_tokens - 1) // size
    what = f"token {difference.token} was sampled from KV of the blocks 0-{last}"
    if difference.token == 0:
        return f"0-{prompt}", [f"{what}, which the worker of the prompt computed or had cached"]
    if difference.token == 1 and len(wrong.workers) == 2:
        moved = f"{what}, of which 0-{prompt} came from {wrong.workers[0]}"
        return f"0-{prompt}", [f"{moved} over {wrong.transport or 'the KV link'}"]
    text = f"{what}; the {difference.token} tokens before it were right with the same prompt"
    return f"{prompt}-{last}", [text]


def _of_incident(capsule: Capsule) -> tuple[str, list[str]]:
    """Return the worker that sampled the first wrong token of the incident, "" if none was wrong or
    nobody knows, and what the capsule says of the incident."""
    first, found = "", list[str]()
    for answer in capsule.answers:
        dead = dict.fromkeys(x.worker for x in answer.streams if x.died)
        found += [f"in the incident {name} died while it ran the request" for name in dead]
        if answer.expected is None:
            continue
        sent, right = answer.tokens, answer.expected
        sent = sent[: len(right)] if answer.expected_is_part else sent
        right = right if answer.finish_reason else right[: len(sent)]
        pairs = enumerate(zip_longest(sent, right))
        if (at := next((i for i, (x, y) in pairs if x != y), None)) is None:
            continue
        text = f"in the incident token {at} of answer {answer.index} was wrong"
        for span in answer.spans:
            if span.start <= at < span.end:
                first = first or span.worker
                text += f"; {span.worker} sampled it"
                text += f" with KV from {span.source}" if span.source else ""
        found.append(text)
    return first, found


def show(verdict: ReplayVerdict) -> None:
    """Print a verdict."""
    what = f"{verdict.tokens} {verdict.compared_with} tokens"
    text = f"{verdict.result}: request {printable(verdict.request_id)}, {what}"
    if (found := verdict.difference) is not None:
        got, want = ("the end" if x is None else x for x in (found.got, found.want))
        text += f"; at token {found.token} of answer {found.index}: {got} instead of {want}"
    say(text)
    for number, one in enumerate(verdict.replays, 1):
        note = f"at token {one.difference.token}" if one.difference is not None else one.error
        where = f"({' to '.join(one.workers)})" if one.workers else ""
        say(" ".join(filter(None, (f"  replay {number}: {one.result}", note, where))))
    for line in verdict.points_to:
        say(f"  {printable(line)}")
