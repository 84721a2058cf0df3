"""A request is one trace over router, prefill worker and decode worker, in a store with a UI."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest

from tests.patience import START_S, WAIT_S
from tests.up_process import run_cli, up

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.skipif(
    shutil.which("phoenix") is None,
    reason="needs the command phoenix of arize-phoenix, in an environment of its own",
)


def spans_at(web: str) -> list[dict[str, Any]]:
    url = f"http://{web}/v1/projects/default/spans?limit=100"
    try:
        with urllib.request.urlopen(url, timeout=WAIT_S) as answer:
            found: list[dict[str, Any]] = json.load(answer)["data"]
    except urllib.error.HTTPError:  # the project is made with its first span
        return []
    return found


@pytest.fixture
def phoenix(tmp_path: Path) -> Iterator[tuple[str, str]]:
    """Yield the addresses of a store: of its UI, and for OTLP over gRPC."""
    with socket.create_server(("127.0.0.1", 0)) as a, socket.create_server(("127.0.0.1", 0)) as b:
        web, otlp = (f"127.0.0.1:{x.getsockname()[1]}" for x in (a, b))
    settings = {
        "PHOENIX_WORKING_DIR": str(tmp_path),
        "PHOENIX_HOST": "127.0.0.1",
        "PHOENIX_PORT": web.rpartition(":")[2],
        "PHOENIX_GRPC_PORT": otlp.rpartition(":")[2],
        "PHOENIX_TELEMETRY_ENABLED": "false",
    }
    with (tmp_path / "log").open("w") as log:
        words = ["phoenix", "serve"]
        store = subprocess.Popen(words, env=os.environ | settings, stdout=log, stderr=log)
    try:
        ends_at = time.monotonic() + START_S
        while True:
            try:
                spans_at(web)
                break
            except urllib.error.URLError:
                assert store.poll() is None, (tmp_path / "log").read_text()
                assert time.monotonic() < ends_at
                time.sleep(0.5)
        yield web, otlp
    finally:
        store.terminate()
        store.wait(WAIT_S)


def test_a_request_is_one_trace_over_three_processes(
    tmp_path: Path, phoenix: tuple[str, str]
) -> None:
    web, otlp = phoenix
    sets = [f"--set={x}.otlp_endpoint=http://{otlp}" for x in ("router", "worker")]
    with up(tmp_path, "--engine", "fake", *sets) as running:
        ready = running.wait_until_serving(within_s=START_S)
        asked = run_cli("generate", "hello there", "--grpc", ready["grpc"], "--max-tokens", "20")
        assert asked.returncode == 0, asked.stderr
        running.send(signal.SIGINT)  # what was not exported yet is exported at the end
        assert running.wait() == 0
    names, by_name = ("prefill_stream", "decode_stream"), dict[str, Any]()
    ends_at = time.monotonic() + WAIT_S
    while not by_name.keys() >= {"request", *names}:
        assert time.monotonic() < ends_at
        by_name = {span["name"]: span for span in spans_at(web)}
        time.sleep(0.5)
    request = by_name["request"]["context"]
    for name in names:
        assert by_name[name]["context"]["trace_id"] == request["trace_id"]
        assert by_name[name]["parent_id"] == request["span_id"]
