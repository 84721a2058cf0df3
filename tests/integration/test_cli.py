"""The commands that talk to a running service, as a person types them."""

from __future__ import annotations

import asyncio
import json
import socket
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.cluster import Cluster
from tests.support.commands import run_cli
from tests.support.pdserve_up import up
from tests.support.timeouts import WAIT_S

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Start a service with fake engines. Return its ready file."""
    with up(tmp_path_factory.mktemp("up")) as running:
        yield running.wait_until_serving()


@pytest.fixture
def where(service: dict[str, Any]) -> tuple[str, str]:
    return "--grpc", service["grpc"]


def test_generate_streams_an_answer_or_prints_one_object(where: tuple[str, str]) -> None:
    ended = run_cli("generate", *where, "--max-tokens", "8", "--json", "-", stdin="What is KV?")
    answer = json.loads(ended.stdout)
    assert answer["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 8
    assert answer["receipt"]["prefill_worker"] == "prefill-0"
    assert answer["receipt"]["decode_worker"] == "decode-0"
    assert answer["receipt"]["transfer_blocks"] >= 1
    streamed = run_cli("generate", *where, "--max-tokens", "8", "--receipt", "What is KV?")
    assert streamed.stdout == answer["text"] + "\n"
    assert "prefill-0" in streamed.stderr
    assert "decode-0" in streamed.stderr


def test_a_refused_request_fails_with_its_field(where: tuple[str, str]) -> None:
    ended = run_cli("generate", *where, "--top-p", "7", "x")
    assert ended.returncode == 1
    assert "rejected" in ended.stderr
    assert "top_p" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_missing_service_is_reported() -> None:
    ended = run_cli("generate", "--grpc", "127.0.0.1:1", "x")
    assert ended.returncode == 1
    assert "pdserve up" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_chat_answers_each_line_and_ends_with_its_input(where: tuple[str, str]) -> None:
    ended = run_cli("chat", *where, "--max-tokens", "5", stdin="one\n\n/reset\ntwo\n")
    assert ended.returncode == 0, ended.stderr
    assert len(ended.stdout.splitlines()) == 2


def test_a_refused_turn_does_not_end_the_chat(where: tuple[str, str]) -> None:
    ended = run_cli("chat", *where, "--max-tokens", "1000000", stdin="one\ntwo\n")
    assert ended.returncode == 0
    assert ended.stdout.count("rejected") == 2


def test_status_shows_every_worker_and_an_empty_ledger(service: dict[str, Any]) -> None:
    where = ("--grpc", service["grpc"], "--timeout", str(WAIT_S))
    table = run_cli("status", *where)
    assert table.returncode == 0, table.stderr
    assert "prefill-0" in table.stdout
    assert "decode-0" in table.stdout
    assert "cannot exchange KV" not in table.stdout
    listed = json.loads(run_cli("status", "--json", *where).stdout)["workers"]
    assert [worker["role"] for worker in listed] == ["decode", "prefill"]
    for worker in listed:
        assert worker["state"] == "ready"
        assert worker["answers"]
        assert worker["ledger"] == dict.fromkeys(worker["ledger"], 0)
        assert worker["kv"]["ledger"] == worker["ledger"]
        assert worker["uptime_s"] > 0
        assert worker["load"]["free_blocks"] == worker["total_blocks"]


async def test_status_names_a_worker_that_does_not_answer() -> None:
    """A server that accepts connections and does not answer, as behind a cut network."""
    async with Cluster(prefill=1, decode=1) as cluster:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            address = f"127.0.0.1:{silent.getsockname()[1]}"
            info = cluster.workers["decode-0"].info
            cut = replace(info, worker_id="cut", address=address, session_address=address)
            cluster.router.fleet.register(cut)
            shown = await asyncio.to_thread(run_cli, "status", "--grpc", cluster.grpc)
    assert shown.returncode == 0, shown.stderr
    assert f"cut at {address}: DEADLINE_EXCEEDED" in shown.stdout


def test_top_shows_what_happened_and_who_did_it(service: dict[str, Any]) -> None:
    where = ("--url", service["http"], "--grpc", service["grpc"], "--interval", "0.5")
    shown = run_cli("top", *where, "--once")
    assert shown.returncode == 0, shown.stderr
    assert "tokens/s" in shown.stdout
    assert "decode-0" in shown.stdout
    found = json.loads(run_cli("top", *where, "--once", "--json").stdout)
    assert found["interval_s"] >= 0.5
    assert [worker["role"] for worker in found["workers"]] == ["decode", "prefill"]
    assert found["latency_s"]["TTFT"].keys() == {"mean", "p50", "p90", "p99"}


def test_top_reports_that_no_router_answers() -> None:
    ended = run_cli("top", "--url", "http://127.0.0.1:1", "--once")
    assert ended.returncode == 1
    assert "no router" in ended.stderr
    assert "Traceback" not in ended.stderr
