"""A real Prometheus scrapes real routers and workers and evaluates every expression of every
dashboard. None fails, and none is empty after a run with every kind of event."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import time
import urllib.parse
import urllib.request
from typing import TYPE_CHECKING, Any

import openai
import pytest
import yaml
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.registry import Collector

from pdserve.observe.metrics import family
from pdserve.security.keys import hash_key, new_key
from pdserve.v1 import worker_pb2 as w
from tests.support.commands import run_cli
from tests.support.dashboards import generate
from tests.support.pdserve_up import up
from tests.support.timeouts import START_S, WAIT_S
from workers.metering.gpu_health import Gpus

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator
    from pathlib import Path

    from prometheus_client.core import Metric


pytestmark = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="needs Debian's package prometheus"
)
KEY, OTHER_KEY = new_key(), new_key()
ACME = {"name": "acme", "keys": [hash_key(KEY)], "requests_per_minute": 60}
CONFIG = {
    "router": {
        "roles": {"auto": True},
        "tenants": [ACME, {"name": "other", "keys": [hash_key(OTHER_KEY)]}],
        "prices": {"cpu": 0.05},
    },
}
LISTENING = re.compile(r'msg="Listening on" .*?address=127\.0\.0\.1:(\d+)')


class Prometheus:
    def __init__(self, folder: Path, targets: list[str]) -> None:
        config = {
            "global": {"scrape_interval": "1s"},
            "scrape_configs": [{"job_name": "pdserve", "static_configs": [{"targets": targets}]}],
        }
        (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
        words = ["prometheus", f"--config.file={folder / 'prometheus.yaml'}"]
        words += [f"--storage.tsdb.path={folder / 'data'}", "--web.listen-address=127.0.0.1:0"]
        self._log = (folder / "log").open("w")
        self._process = subprocess.Popen(words, stdout=self._log, stderr=self._log)
        ends_at = time.monotonic() + WAIT_S
        while (found := LISTENING.search((folder / "log").read_text())) is None:
            assert self._process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < ends_at
            time.sleep(0.1)
        self._port = int(found[1])

    def series(self, expr: str) -> list[Any]:
        """Return what `expr` is now. Raises if Prometheus cannot compute it."""
        query = urllib.parse.urlencode({"query": expr})
        url = f"http://127.0.0.1:{self._port}/api/v1/query?{query}"
        with urllib.request.urlopen(url, timeout=WAIT_S) as answer:
            result: list[Any] = json.load(answer)["data"]["result"]
        return result

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(WAIT_S)
        self._log.close()


class Energy(Collector):
    """Return the metrics of a router whose workers count energy."""

    def collect(self) -> Iterator[Metric]:
        kinds = ("prefill", "decode", "waste", "idle")
        yield family("energy_joules", [(("pdserve-demo", "decode", x, ""), 1.0) for x in kinds])


@pytest.fixture
def gpu_target() -> Iterator[str]:
    """Yield the address of a page with what needs a GPU. The figures are made up."""
    registry, gpus = CollectorRegistry(), Gpus()
    gpus.latest = [
        w.GpuHealth(index=0, temperature_c=60, memory_used_bytes=1, memory_total_bytes=2)
    ]
    registry.register(gpus)
    registry.register(Energy())
    server, thread = start_http_server(0, addr="127.0.0.1", registry=registry)
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join(WAIT_S)


def ask(client: openai.OpenAI, prompt: str, tokens: int) -> Generator[str, None, None]:
    with client.completions.create(
        model="pdserve-demo",
        prompt=prompt,
        max_tokens=tokens,
        stream=True,
        extra_body={"ignore_eos": True},
    ) as answer:
        for chunk in answer:
            yield from (choice.text for choice in chunk.choices)


def drive(ready: dict[str, Any]) -> None:
    """Answers, a refusal, a decode worker killed in the middle of answers, a client that leaves, a
    tenant's limit."""
    with openai.OpenAI(base_url=f"{ready['http']}/v1", api_key=KEY, max_retries=0) as client:
        for i in range(40):
            assert "".join(ask(client, f"{i} red leaves " * (1 + i % 20), 4 + i % 5))
        with pytest.raises(openai.BadRequestError):
            list(ask(client, "a", 10**6))
        answers = [ask(client, f"{i} leaves", 1000) for i in range(4)]
        for answer in answers:
            next(answer)
        os.kill(next(w["pid"] for w in ready["workers"] if w["role"] == "decode"), signal.SIGKILL)
        for answer in answers:
            assert list(answer)
        leaving = ask(client, "many leaves", 1000)
        next(leaving)
        leaving.close()
        for _ in range(100):
            try:
                list(ask(client, "a", 1))
            except openai.RateLimitError:
                return
        pytest.fail("the tenant's limit refused nothing")


def test_prometheus_has_an_answer_to_every_expression(tmp_path: Path, gpu_target: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(CONFIG))
    pools = ("--prefill", "1", "--decode", "2", "--set", "router.policy=slo_aware")
    with up(tmp_path, "--engine", "vllm", "--config", str(path), *pools) as running:
        ready = running.wait_until_serving(within_s=START_S)
        workers = json.loads(run_cli("status", "--grpc", ready["grpc"], "--json").stdout)["workers"]
        pages = [urllib.parse.urlsplit(ready["http"]).netloc, gpu_target]
        pages += [worker["debug_address"] for worker in workers]
        (tmp_path / "prometheus").mkdir()
        prometheus = Prometheus(tmp_path / "prometheus", pages)
        try:
            drive(ready)
            left = {
                expr
                for dashboard in generate.DASHBOARDS.values()
                for panel in dashboard["panels"]
                for expr in generate.queries(panel).values()
            }
            ends_at = time.monotonic() + WAIT_S
            other = openai.OpenAI(base_url=f"{ready['http']}/v1", api_key=OTHER_KEY)
            with other:
                for i in itertools.count():
                    for expr in sorted(left):
                        asked = expr.replace("$__rate_interval", "10m").replace("$model", ".*")
                        if prometheus.series(asked):
                            left.discard(expr)
                    if not left or time.monotonic() > ends_at:
                        break
                    # What is predicted takes as many requests as it takes.
                    assert list(ask(other, f"{i} blue hills " * (1 + i % 20), 8))
                    time.sleep(0.5)
            assert not left
        finally:
            prometheus.close()
        running.send(signal.SIGINT)
        assert running.wait() == 0
