"""``pdserve bench`` as a person calls it: exit statuses, messages, output."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from fake_openai import FakeOpenAI

from benchmarks import cli, options
from benchmarks.cli import register
from benchmarks.metrics import PER_REQUEST
from benchmarks.schedule import TICK_JITTERS
from benchmarks.trace_columns import TIME_UNITS
from benchmarks.trace_formats import FORMATS

if TYPE_CHECKING:
    from pathlib import Path


def _main(*argv: str) -> int:
    parser = argparse.ArgumentParser(prog="pdserve")
    register(parser.add_subparsers(required=True))
    args = parser.parse_args(["bench", *argv])
    status = args.handler(args)
    assert isinstance(status, int)
    return status


async def _replay(server: FakeOpenAI, *argv: str) -> int:
    fast = ("--url", server.url, "--limit", "4", "--speedup", "1e6", "--scale-lengths", "1/32")
    return await asyncio.to_thread(_main, "replay", *fast, *argv)


async def test_a_replay_prints_a_table_and_keeps_the_timelines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "result.json"
    async with FakeOpenAI().serve() as server:
        slo = "ttft=60s,tpot=60000ms"
        assert await _replay(server, "--out", str(out), "--slo", slo, "--warmup", "2") == 0
    text, notes = capsys.readouterr()
    for part in ("TTFT from schedule", "TT2T", "requests: 4, ok 4, failed 0", "fallbacks: none"):
        assert part in text
    assert "attained by 100.0% of all requests" in text
    assert "4 requests of" in notes
    result = json.loads(out.read_text())
    assert len(result["records"]) == 4
    assert len(result["warmup"]) == 2
    assert result["settings"]["scale_lengths"] == "1/32"
    assert result["slo_s"] == {"ttft": 60.0, "tpot": 60.0}


async def test_json_is_all_that_json_prints(capsys: pytest.CaptureFixture[str]) -> None:
    async with FakeOpenAI().serve() as server:
        assert await _replay(server, "--json", "--trace", "longchat") == 0
    summary = json.loads(capsys.readouterr().out)["summary"]
    assert (summary["requests"], summary["ok"]) == (4, 4)


@pytest.mark.parametrize("fault", ["refuse", "short", "break"])
async def test_a_failed_request_is_exit_status_1(
    fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    server = FakeOpenAI(fault=lambda number: fault if number == 2 else None)
    async with server.serve():
        assert await _replay(server) == 1
    assert "ok 3, failed 1" in capsys.readouterr().out


async def test_a_failed_warm_up_is_exit_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    async with FakeOpenAI(fault=lambda _number: "refuse").serve() as server:
        assert await _replay(server) == 1
    assert "warm-up request 1 failed: HTTP 429: full" in capsys.readouterr().err


async def test_an_unreachable_server_is_exit_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    async with FakeOpenAI().serve() as server:
        pass
    assert await _replay(server) == 2
    assert "is the server running there?" in capsys.readouterr().err


BAD_OPTIONS = [
    (["--limit", "0"], "--limit: '0' must be at least 1"),
    (["--limit", "-3"], "--limit"),
    (["--speedup", "0"], "--speedup: '0' is not a number above 0"),
    (["--speedup", "nan"], "--speedup"),
    (["--scale-lengths", "1/0"], "such as 1/8 or 0.5"),
    (["--scale-lengths", "-1"], "--scale-lengths"),
    (["--warmup", "x"], "--warmup: 'x' is not a whole number"),
    (["--slo", "ttft=500"], "ttft=500: give a time above 0 with its unit"),
    (["--slo", "ttft=xms"], "with its unit"),
    (["--slo", "ttft=-1s"], "with its unit"),
    (["--slo", "itl=5ms"], "unknown metric 'itl'; known are ttft"),
    (["--slo", "ttft=5ms,ttft=6ms"], "ttft is given twice"),
    (["--tick-jitter", "some"], "--tick-jitter"),
    (["--url", "http://h", "--grpc", "h:1"], "not allowed with"),
]


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS, ids=lambda value: str(value)[:40])
def test_a_bad_option_is_named(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        _main("replay", *options)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


BAD_INPUT = [
    (["replay", "--trace", "none"], "give one of chat, code, longchat"),
    (["replay", "--url", "localhost:8000"], "is not like http://127.0.0.1:8000"),
    (["replay", "--out", "/nowhere/at/all.json"], "there is no directory /nowhere/at"),
    (["describe", "none.csv"], "no trace 'none.csv'"),
    (["describe", "chat", "--from", "mooncake"], "conv.first10000.csv:1: not JSON"),
    (["describe", "longchat", "--block-size", "16"], "hash_ids: 14 ids for 6758 tokens"),
    (["convert", "chat", "out.csv"], "name it *.jsonl"),
]


@pytest.mark.parametrize(("argv", "message"), BAD_INPUT, ids=lambda value: str(value)[:40])
def test_bad_input_is_exit_status_2(
    argv: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert _main(*argv) == 2
    assert message in capsys.readouterr().err


def test_describe_prints_what_it_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert _main("describe", "longchat") == 0
    text = capsys.readouterr().out
    for part in ("4,000", "13,312.3", "33.1%", "arrivals are rounded to"):
        assert part in text
    assert _main("describe", "code", "--json") == 0
    assert json.loads(capsys.readouterr().out)["requests"] == 8819


def test_convert_writes_a_trace_that_describes_alike(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = str(tmp_path / "mine.jsonl")
    assert _main("convert", "chat", copy) == 0
    assert _main("convert", "chat", copy) == 2
    assert "--force replaces it" in capsys.readouterr().err
    assert _main("convert", "chat", copy, "--force", "--name", "chat") == 0
    capsys.readouterr()
    assert _main("describe", copy, "--json") == 0
    converted = json.loads(capsys.readouterr().out)
    assert _main("describe", "chat", "--json") == 0
    original = json.loads(capsys.readouterr().out)
    assert converted.pop("burstiness") == original.pop("burstiness")
    assert converted == original | {
        key: pytest.approx(original[key]) for key in ("duration_s", "interarrival_cv")
    }


def test_the_parser_offers_what_there_is() -> None:
    assert tuple(PER_REQUEST) == options.SLO_METRICS
    assert cli.TICK_JITTERS == TICK_JITTERS
    assert cli.TIME_UNITS == TIME_UNITS
    assert tuple(FORMATS) == cli.FORMATS


def test_an_interrupted_command_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_args: argparse.Namespace) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_run_replay", interrupt)
    assert _main("replay") == 130
    assert "interrupted" in capsys.readouterr().err


def test_registering_imports_nothing_heavy() -> None:
    program = (
        "import argparse, sys; from benchmarks.cli import register; "
        "register(argparse.ArgumentParser().add_subparsers()); "
        "print({'numpy', 'aiohttp', 'rich', 'uvloop', 'torch', 'vllm'} & set(sys.modules))"
    )
    printed = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert printed == "set()\n"
