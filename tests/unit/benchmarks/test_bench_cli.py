"""`pdserve bench` as a person calls it: exit statuses and messages."""

from __future__ import annotations

import argparse
import asyncio
import json
from typing import TYPE_CHECKING

import pytest

from benchmarks.cli import register
from tests.support.fake_openai import FakeOpenAI

if TYPE_CHECKING:
    from pathlib import Path


def bench(*argv: str) -> int:
    parser = argparse.ArgumentParser(prog="pdserve")
    register(parser.add_subparsers(required=True))
    args = parser.parse_args(["bench", *argv])
    status: int = args.handler(args)
    return status


async def replay(server: FakeOpenAI, *argv: str) -> int:
    fast = ("--url", server.url, "--limit", "4", "--speedup", "1e6", "--scale-lengths", "1/32")
    return await asyncio.to_thread(bench, "replay", *fast, *argv)


async def test_a_replay_is_printed_kept_and_printed_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "result.json"
    async with FakeOpenAI().serve() as server:
        limits = ("--slo-ttft", "60000", "--slo-tpot", "60000")
        assert await replay(server, "--out", str(out), *limits) == 0
    text, notes = capsys.readouterr()
    for part in ("TT2T (token 1 to 2)", "requests: 4, ok 4, failed 0", "fallbacks: none"):
        assert part in text
    assert "trace chat (azure format)" in notes
    assert bench("report", str(out)) == 0
    assert capsys.readouterr().out == text
    assert bench("report", str(tmp_path)) == 0
    assert capsys.readouterr().out == text
    assert bench("report", str(out), "--json") == 0
    assert json.loads(capsys.readouterr().out)["summary"]["slo"]["attainment"] == 1.0
    assert bench("report", str(out), "--html", str(tmp_path / "x.html")) == 2
    assert "has no HTML report" in capsys.readouterr().err


@pytest.mark.parametrize(("bad", "status"), [(2, 1), (0, 1)])
async def test_a_failed_request_is_exit_status_1(bad: int, status: int) -> None:
    server = FakeOpenAI(fault=lambda number: "refuse" if number == bad else None)
    async with server.serve():
        assert await replay(server) == status


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--limit", "0"], "--limit: '0' is not a whole number from 1 up"),
        (["--speedup", "nan"], "--speedup: 'nan' is not a number above 0"),
        (["--scale-lengths", "1/0"], "such as 1/8 or 0.5"),
    ],
    ids=str,
)
def test_a_bad_option_is_named(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        bench("replay", *options)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["replay", "--trace", "none", "--url", "{url}"], "give one of chat, code, longchat"),
        (["replay", "--url", "localhost:8000"], "is not like http://127.0.0.1:8000"),
        (["replay", "--url", "http://h", "--grpc", "h:1"], "not allowed with"),
        (["replay", "--out", "/nowhere/at/all.json"], "there is no directory /nowhere/at"),
        (["report", "/nowhere"], "cannot read /nowhere"),
        (["compare", "--sweep"], "--sweep needs --slo-ttft or --slo-tpot"),
        (["compare", "--rounds", "0"], "--rounds 0 measures nothing"),
        (["compare", "--arms", "2A"], "at least two variants"),
        (["compare", "--variants", "1P1D,2A", "--baseline", "3A"], "is not a variant"),
        (["compare", "--out", "/proc/nothing"], "--out /proc/nothing"),
        (["compare", "--resume", "/nowhere"], "cannot read /nowhere/result.json"),
    ],
    ids=str,
)
def test_bad_input_is_exit_status_2(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(*(x.replace("{url}", "http://127.0.0.1:9") for x in argv)) == 2
    assert message in capsys.readouterr().err
