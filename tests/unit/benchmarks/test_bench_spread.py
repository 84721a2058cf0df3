"""Replay against several addresses of one service, and against one that speaks TLS."""

from __future__ import annotations

import argparse
import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest
from fake_openai import FakeOpenAI

from benchmarks.cli import register
from benchmarks.compare.cli import add_compare, prepare
from benchmarks.errors import BenchError
from benchmarks.grpc_target import GrpcTarget
from benchmarks.spread import open_grpc, open_http
from pdserve import rpc
from pdserve.access.tls import http_context, server_credentials, tls_dialer
from pdserve.config import HttpTlsConfig, TlsConfig
from pdserve.v1 import generation_pb2, generation_pb2_grpc
from tests.pki import Ca

if TYPE_CHECKING:
    from pathlib import Path


def _main(*argv: str) -> int:
    parser = argparse.ArgumentParser(prog="pdserve")
    register(parser.add_subparsers(required=True))
    args = parser.parse_args(["bench", *argv])
    status: int = args.handler(args)
    return status


async def _replay(*argv: str) -> int:
    fast = ("--limit", "4", "--speedup", "1e6", "--scale-lengths", "1/32", "--warmup", "0")
    return await asyncio.to_thread(_main, "replay", *fast, *argv)


async def test_requests_go_to_all_addresses_in_turn() -> None:
    async with FakeOpenAI().serve() as first, FakeOpenAI().serve() as second:
        assert await _replay("--url", f"{first.url},{second.url}/v1") == 0
        assert (len(first.bodies), len(second.bodies)) == (2, 2)


async def test_addresses_of_different_services_are_refused() -> None:
    async with FakeOpenAI().serve() as first, FakeOpenAI(models=[{"id": "x"}]).serve() as second:
        target = open_http(f"{first.url},{second.url}")
        with pytest.raises(BenchError, match="they are not one service"):
            await target.model(None)
        await target.aclose()
    with pytest.raises(BenchError, match="--grpc 'h'"):
        open_grpc("127.0.0.1:1,h")
    with pytest.raises(BenchError, match="--url ''"):
        open_http("http://127.0.0.1:1,")


async def test_a_service_with_tls_is_reached_with_its_ca_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ca = Ca(tmp_path)
    files = ca.issue("router")
    tls = http_context(HttpTlsConfig(cert_file=files.cert, key_file=files.key))
    async with FakeOpenAI().serve(tls) as server:
        assert await _replay("--url", server.url, "--json", "--tls-ca", ca.path) == 0
        assert json.loads(capsys.readouterr().out)["summary"]["ok"] == 4
        assert await _replay("--url", server.url) == 2
        assert "certificate" in capsys.readouterr().err


class _Listing(generation_pb2_grpc.GenerationServicer):
    """Says what it serves to whoever has the key."""

    async def ListModels(self, request: Any, context: Any) -> generation_pb2.ListModelsResponse:  # noqa: N802
        assert dict(context.invocation_metadata())["authorization"] == "Bearer k"
        card = generation_pb2.ModelCard(name="demo", max_model_len=8192, vocab_size=2048)
        return generation_pb2.ListModelsResponse(models=[card])


async def test_grpc_with_tls_is_reached_with_its_ca_and_a_key(tmp_path: Path) -> None:
    ca = Ca(tmp_path)
    files = ca.issue("router")
    server = rpc.make_server()
    generation_pb2_grpc.add_GenerationServicer_to_server(_Listing(), server)
    credentials = server_credentials(TlsConfig(cert_file=files.cert, key_file=files.key))
    address = f"127.0.0.1:{rpc.listen(server, '127.0.0.1:0', credentials)}"
    await server.start()
    try:
        both = open_grpc(f"{address},{address}", tls_dialer(ca_file=ca.path, token="k"))
        assert (await both.model(None)).name == "demo"
        assert both.address == f"{address},{address}"
        await both.aclose()
        plain = GrpcTarget(address)
        with pytest.raises(BenchError, match="UNAVAILABLE"):
            await plain.model(None)
        await plain.aclose()
    finally:
        await server.stop(None)


def test_an_arm_that_is_a_url_gets_the_key_and_a_started_one_the_limits() -> None:
    parser = argparse.ArgumentParser()
    add_compare(parser.add_subparsers())
    argv = ["compare", "--arms", "1P1D", "--arm", "peer=https://h:1,https://h:2"]
    argv += ["--api-key", "secret", "--slo-ttft", "2000", "--slo-tpot", "40", "--cores", "2"]
    settings, (started, peer) = prepare(parser.parse_args(argv))
    assert peer.api_key == "secret"
    assert "secret" not in f"{settings}{peer}"
    assert started.config is not None
    told = {"ttft_s": 2.0, "tpot_s": 0.04, "refuse_beyond": 1.0}
    assert started.config["router"]["slo"] == told
    _, (kept, _) = prepare(parser.parse_args([*argv, "--set", "router.slo.ttft_s=9"]))
    assert kept.config is not None
    assert kept.config["router"]["slo"] == {**told, "ttft_s": 9}
    without = [*argv[: argv.index("--slo-ttft")], "--cores", "2"]
    _, (free, _) = prepare(parser.parse_args(without))
    assert free.config is not None
    assert free.config["router"]["slo"]["refuse_beyond"] == 0.0, "nobody promised anything"
