"""Which directories a client may have loaded as a LoRA adapter."""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc.aio
import pytest

from pdserve.config import WorkerConfig
from pdserve.errors import InvalidRequest, PermissionDenied
from pdserve.net.rpc import PLAIN, error_from_rpc
from pdserve.v1 import worker_pb2 as w
from pdserve.v1.worker_pb2_grpc import WorkerStub
from tests.support.timeouts import WAIT_S
from workers.control.loaded_adapters import directory_within, read_adapter
from workers.server import WorkerServer

if TYPE_CHECKING:
    from pathlib import Path


def adapter(directory: Path, weights: str = "adapter_model.safetensors") -> Path:
    directory.mkdir(parents=True)
    (directory / "adapter_config.json").write_text("{}")
    (directory / weights).write_bytes(b"1")
    return directory


def test_an_adapter_must_lie_in_an_allowed_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, outside = tmp_path / "root", adapter(tmp_path / "outside")
    red = adapter(root / "red")
    (tmp_path / "link").symlink_to(root)
    assert directory_within([str(tmp_path / "link")], str(red)) == str(red)
    assert directory_within(["/nothing", str(root)], f"{root}/blue/../red") == str(red)

    (root / "out").symlink_to(outside)
    files = adapter(root / "files")
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (files / name).unlink()
        (files / name).symlink_to(outside / name)
    (root / "circle").symlink_to(root / "circle")
    monkeypatch.chdir(root)
    monkeypatch.setenv("HOME", str(outside))
    for path in (
        *(outside, root / "out", files, root / ".." / "outside", root / "circle", "/etc/ssl"),
        *("", "~", "~nobody-of-this-name/x", "\0", f"{root}-x", "/" + "x" * 5000),
    ):
        with pytest.raises(PermissionDenied, match=r"not below worker\.adapter_dir"):
            directory_within([str(root / "red"), str(root / "files")], str(path))


async def test_none_is_loaded_over_the_api_unless_it_is_switched_on(tmp_path: Path) -> None:
    worker = WorkerServer(WorkerConfig(worker_id="w", engine="fake", routers=("127.0.0.1:1",)))
    info = await worker.start()
    request = w.LoadAdapterRequest(name="red", path=str(adapter(tmp_path / "red")))
    async with PLAIN.open_channel(info.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await WorkerStub(channel).LoadAdapter(request, timeout=WAIT_S)
    found = error_from_rpc(refused.value)
    assert isinstance(found, PermissionDenied)
    assert "worker.adapter_directories" in found.message
    await worker.stop()


@pytest.mark.parametrize("weights", ["adapter_model.bin", "adapter_model.pt"])
def test_pickles_are_refused_by_name(tmp_path: Path, weights: str) -> None:
    with pytest.raises(InvalidRequest, match=weights):
        read_adapter("red", str(adapter(tmp_path / "red", weights)), "m")
