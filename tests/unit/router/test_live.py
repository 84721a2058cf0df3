"""Changes of the configuration that a running router takes over."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
import yaml

from pdserve.config import RouterConfig, parse
from pdserve.errors import ConfigError, Overloaded
from pdserve.observe.audit import Caller
from pdserve.process.forkserver import launched
from pdserve.security.keys import hash_key
from router.admission.tenants import Tenants
from router.main import RouterServer
from tests.support.timeouts import WAIT_S, wait_until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


def raw(*keys: str, **values: Any) -> dict[str, Any]:
    tenants = [{"name": "acme", "keys": [hash_key(x) for x in keys]}]
    return {"http": {"port": 0}, "grpc": {"port": 0}, "tenants": tenants, **values}


def config(*keys: str, **values: Any) -> RouterConfig:
    return parse(RouterConfig, raw(*keys, **values))


@asynccontextmanager
async def running(
    config: RouterConfig,
) -> AsyncIterator[tuple[RouterServer, aiohttp.ClientSession]]:
    server = RouterServer(config)
    try:
        url = f"http://{(await server.start()).http}"
        async with aiohttp.ClientSession(url) as http:
            yield server, http
    finally:
        await server.stop(0.0)


async def status_of(http: aiohttp.ClientSession, key: str) -> int:
    async with http.get("/v1/models", headers={"authorization": f"Bearer {key}"}) as response:
        return response.status


async def test_keys_tenants_slos_prices_and_origins_change(tmp_path: Path) -> None:
    audit = tmp_path / "audit.log"
    async with running(config("old", log={"audit": str(audit)})) as (server, http):
        new = raw("new", log={"audit": str(audit)}, prices={"cpu": 2.0})
        new["tenants"].append({"name": "late", "keys": [hash_key("k")], "requests_per_minute": 60})
        new |= {"slo": {"ttft_s": 3.0}, "http": {"port": 1, "cors_origins": ["https://a.example"]}}
        server.live.change(parse(RouterConfig, new), Caller("SIGHUP"))
        assert [await status_of(http, x) for x in ("old", "new", "k")] == [401, 200, 200]
        async with http.get("/health", headers={"origin": "https://a.example"}) as response:
            assert response.headers["access-control-allow-origin"] == "https://a.example"
        assert server.metrics.slo.ttft_s == 3.0
        assert server.live.path.workers.billing.prices == {"cpu": 2.0}
        assert server.live.config.http.port == 0  # changes with a restart
    line = json.loads(audit.read_text())
    assert (line["by"], line["result"]) == ("SIGHUP", "ok")
    assert line["changed"] == ["http.cors_origins", "tenants", "slo.ttft_s", "prices"]
    assert line["removed"] == [f"tenant acme: {hash_key('old')[:19]}"]


async def test_a_change_that_would_open_or_close_the_service_changes_nothing() -> None:
    async with running(config("old")) as (server, http):
        new = parse(RouterConfig, raw(slo={"ttft_s": 9.0}) | {"tenants": []})
        with pytest.raises(ConfigError, match=r"router\.tenants: .* need a restart"):
            server.live.change(new, Caller("SIGHUP"))
        assert [await status_of(http, x) for x in ("old", "new", "")] == [200, 401, 401]
        assert server.metrics.slo.ttft_s != 9.0


def test_a_tenant_keeps_its_use_when_its_limits_change() -> None:
    def configs(*names: str, per_minute: float) -> Any:
        tenants = [{"name": x, "requests_per_minute": per_minute} for x in names]
        return parse(RouterConfig, {"tenants": tenants}).tenants

    tenants = Tenants(configs("a", "b", per_minute=2))
    tenants["a"].enter(0, 0.0)
    tenants["a"].enter(0, 0.0)
    tenants.use(configs("a", per_minute=4))
    assert tenants.names() == ["a"]
    with pytest.raises(Overloaded, match="4 requests a minute"):
        tenants["a"].enter(0, 0.0)
    assert tenants["a"].open_requests == 2
    tenants["b"].enter(0, 0.0)  # what it had begun goes on


async def test_the_file_is_followed_and_read_again_on_sighup(tmp_path: Path) -> None:
    file, log = tmp_path / "config.yaml", tmp_path / "log"

    def write(text: str) -> None:
        file.with_suffix(".new").write_text(text)
        file.with_suffix(".new").replace(file)

    write(yaml.safe_dump({"router": raw("old")}))
    words = ("pdserve", "router", "--config", str(file))
    async with (
        asyncio.timeout(WAIT_S),
        launched(None, *words, env=os.environ, log=log) as (process, reports),
    ):
        ready = json.loads(await reports.readline())["ready"]
        async with aiohttp.ClientSession(ready["http"]) as http:
            write(yaml.safe_dump({"router": raw("old", "new")}))

            async def is_used() -> bool:
                return await status_of(http, "new") == 200

            await wait_until(is_used)
            write("router: {tenants: [{name: ''}]}")
            os.kill(process.pid, signal.SIGHUP)
            why = "the configuration stays as it was: router.tenants[0].name: must not be empty"
            await wait_until(lambda: why in log.read_text())
            assert await status_of(http, "old") == 200
