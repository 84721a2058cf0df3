"""What a process without credentials, such as another user's, can do at each port of `pdserve up`
and `pdserve serve` with their default configuration."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import grpc.aio
import pytest
import yaml
from google.protobuf import message_factory

from pdserve.net import framing
from pdserve.net.rpc import Dialer
from pdserve.security.keys import hash_key
from pdserve.security.local import admin_key
from pdserve.security.roles import allowed
from pdserve.v1 import admin_pb2, generation_pb2, worker_pb2
from pdserve.v1 import worker_pb2 as w
from pdserve.v1.worker_pb2_grpc import RegistryStub, WorkerStub
from tests.support.commands import run_cli
from tests.support.pdserve_up import UpProcess
from tests.support.timeouts import START_S, WAIT_S

if TYPE_CHECKING:
    from collections.abc import Iterator

ALLOWED, REFUSED = "allowed", "refused"
# Port -> service -> method -> what a stranger gets.
GRPC = {
    "router": {
        "Generation": {"Generate": ALLOWED, "ListModels": ALLOWED},
        "Registry": dict.fromkeys(
            ("Register", "Renew", "Deregister", "ListWorkers", "ReportCrashLoops"), REFUSED
        ),
        "Admin": dict.fromkeys(
            (
                *("Explain", "DrainWorker", "UndrainWorker", "ChangeRole"),
                *("ListRevisions", "SetWeights", "DrainRouter", "UndrainRouter"),
                *("UpdateCheckpoint", "PauseModel", "ResumeModel", "GetCheckpoint"),
                *("ListCapsules", "GetCapsule"),
            ),
            REFUSED,
        ),
    },
    "worker": {
        "Worker": dict.fromkeys(
            (
                *("GetStatus", "Drain", "Undrain", "SetRole", "SettleRole", "GetTokenizer"),
                *("LoadAdapter", "UnloadAdapter", "Render", "UpdateWeights"),
            ),
            REFUSED,
        )
    },
}
# `serve` listens for HTTP on all addresses.
ALLOWED_BY_UP = "allowed by up alone"
# Port -> method and path -> what a stranger gets while there are no tenants.
HTTP = {
    "router": {
        "GET /console": ALLOWED_BY_UP,
        "GET /console/events": ALLOWED_BY_UP,
        "POST /v1/load_lora_adapter": REFUSED,
        "POST /v1/unload_lora_adapter": ALLOWED_BY_UP,
        "GET /health": ALLOWED,
        "GET /ready": ALLOWED,
        "GET /metrics": ALLOWED,
        "GET /v1/models": ALLOWED,
        "GET /v1/files": ALLOWED,
        "POST /v1/completions": ALLOWED,
        "POST /console/drain": REFUSED,
        "POST /console/role": REFUSED,
    },
    "worker": {"GET /metrics": ALLOWED, "GET /debug/kv": ALLOWED, "GET /healthz": ALLOWED},
}
PACKAGES = (generation_pb2, worker_pb2, admin_pb2)
SERVICES = {name: x for p in PACKAGES for name, x in p.DESCRIPTOR.services_by_name.items()}
REFUSALS = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
BODY = {"model": "pdserve-demo", "prompt": "x", "max_tokens": 1}
BODIES = {
    "/v1/completions": BODY,
    "/v1/load_lora_adapter": {"lora_name": "x", "lora_path": "/x"},
    "/v1/unload_lora_adapter": {"lora_name": "x"},
}


@pytest.fixture(scope="module", params=["up", "serve"])
def ready(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Any]]:
    ports = ("router.http.port=0", "router.grpc.port=0", "worker.engine=fake")
    words = [x for setting in ports for x in ("--set", setting)]
    if request.param == "serve":
        words.insert(0, "demo")
    folder = tmp_path_factory.mktemp(request.param)
    running = UpProcess(folder, *words, command=request.param)
    try:
        yield {**running.wait_until_serving(within_s=START_S), "command": request.param}
        assert admin_key(folder / "run") not in running.output
    finally:
        running.close()


def test_the_tables_have_every_method() -> None:
    found = {name: table for port in GRPC.values() for name, table in port.items()}
    for name, methods in found.items():
        assert methods.keys() == {x.name for x in SERVICES[name].methods}
    assert found.keys() == SERVICES.keys()
    # So they hold wherever there is a guard. On Ray and Kubernetes there is one: see
    # test_local_credentials.py and test_deploy.py.
    for name, methods in found.items():
        for method, expected in methods.items():
            is_public = allowed(f"/{SERVICES[name].full_name}/{method}") is None
            assert expected == (ALLOWED if is_public else REFUSED)


async def got(channel: grpc.aio.Channel, service: str, method: str) -> str:
    """Return the status of a call with an empty message."""
    found = SERVICES[service].methods_by_name[method]
    kind = channel.unary_stream if found.server_streaming else channel.unary_unary
    call = kind(
        f"/{SERVICES[service].full_name}/{method}",
        request_serializer=lambda x: x.SerializeToString(),
        response_deserializer=message_factory.GetMessageClass(found.output_type).FromString,
    )(message_factory.GetMessageClass(found.input_type)(), timeout=WAIT_S)
    code = await call.code()
    assert code is not grpc.StatusCode.UNAVAILABLE
    return REFUSED if code in REFUSALS else ALLOWED


async def test_a_stranger_gets_only_what_the_table_permits(ready: dict[str, Any]) -> None:
    worker = ready["workers"][0]
    addresses = {"router": ready["grpc"], "worker": worker["address"]}
    for port, services in GRPC.items():
        async with grpc.aio.insecure_channel(addresses[port]) as channel:
            for service, methods in services.items():
                codes = {name: await got(channel, service, name) for name in methods}
                assert codes == methods, service
    urls = {"router": ready["http"], "worker": f"http://{worker['debug']}"}
    async with aiohttp.ClientSession() as http:
        for port, table in HTTP.items():
            for what, expected in table.items():
                method, path = what.split()
                body = BODIES.get(path, {}) if method == "POST" else None
                got_in = expected == ALLOWED or (
                    expected == ALLOWED_BY_UP and ready["command"] == "up"
                )
                for headers, is_allowed in (({}, got_in), ({"host": "evil.example"}, False)):
                    async with http.request(
                        method, urls[port] + path, json=body, headers=headers
                    ) as response:
                        assert (response.status not in (401, 403)) == is_allowed, (what, headers)
    # The session port takes no prompts of a router that shows no token.
    operator = Dialer(token=admin_key(Path(ready["run_dir"])))
    async with operator.open_channel(ready["grpc"]) as channel:
        listed = await RegistryStub(channel).ListWorkers(
            w.ListWorkersRequest(), metadata=operator.metadata, timeout=WAIT_S
        )
    info = listed.workers[0].info
    host, _, port = info.session_address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    hello = w.Hello(router_id="r", instance_id=info.instance_id)
    writer.write(framing.pack(w.Command(hello=hello)))
    size = int.from_bytes(await reader.readexactly(4), "big")
    assert w.StepFrame.FromString(await reader.readexactly(size)).HasField("closed")
    writer.close()


@pytest.mark.parametrize("ready", ["up"], indirect=True, scope="module")
def test_commands_of_the_same_user_need_no_key(
    ready: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = ("--grpc", ready["grpc"])
    for words in (("status",), ("drain", "decode-0", "--force"), ("drain", "decode-0", "--undo")):
        ended = run_cli(*words, *at)
        assert ended.returncode == 0, ended.stderr
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "of-another-user"))
    ended = run_cli("status", *at)
    assert ended.returncode == 1
    assert "authentication required" in ended.stderr
    key = str(Path(ready["run_dir"]) / "admin.key")
    assert run_cli("status", *at, "--api-key-file", key).returncode == 0


async def test_a_rogue_worker_gets_no_prompt_of_a_tenant(tmp_path: Path) -> None:
    """The stranger knows everything about the workers and can reach all ports."""
    tenants = [{"name": "b", "keys": [hash_key("pd-b")]}]
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({"router": {"tenants": tenants}}))
    words = ("--config", str(config), "--engine", "fake", "--http-port", "0", "--grpc-port", "0")
    running = UpProcess(tmp_path, *words)
    dialled = asyncio.Event()
    server = await asyncio.start_server(lambda *_: dialled.set(), "127.0.0.1", 0)
    try:
        ready = await asyncio.to_thread(running.wait_until_serving)
        operator = Dialer(token=admin_key(Path(ready["run_dir"])))
        async with operator.open_channel(ready["grpc"]) as channel:
            registry = RegistryStub(channel)
            request: Any = w.ListWorkersRequest()
            listed = await registry.ListWorkers(request, metadata=operator.metadata)
            rogue = next(x.info for x in listed.workers if x.info.role == w.ROLE_DECODE)
            rogue.worker_id, rogue.instance_id, rogue.role = "rogue", "r1", w.ROLE_AGGREGATED
            port = server.sockets[0].getsockname()[1]
            rogue.address = rogue.session_address = f"127.0.0.1:{port}"
            # An administrator's key and a tenant's are no worker's either.
            for key in ("", "pd-b", operator.token):
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await registry.Register(
                        w.RegisterRequest(worker=rogue), metadata=Dialer(token=key).metadata
                    )
                assert refused.value.code() in REFUSALS
        # Nor can it take the place of an honest worker.
        for worker in ready["workers"]:
            async with grpc.aio.insecure_channel(worker["address"]) as channel:
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await WorkerStub(channel).Drain(w.DrainRequest(timeout_s=1.0))
                assert refused.value.code() in REFUSALS
        headers = {"authorization": "Bearer pd-b"}
        url = f"{ready['http']}/v1/completions"
        async with (
            aiohttp.ClientSession(headers=headers) as http,
            http.post(url, json=BODY) as response,
        ):
            assert response.status == 200
        assert not dialled.is_set()
    finally:
        server.close()
        await asyncio.to_thread(running.close)
