"""Files in a bucket of a server with S3's protocol."""

from __future__ import annotations

import subprocess
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pdserve.config import StoreConfig
from pdserve.errors import ConfigError, NotFound
from router.store.database import StoreUnavailable
from router.store.store import make_store
from tests.support.timeouts import WAIT_S

if TYPE_CHECKING:
    from collections.abc import Iterator

    from router.store.store import Store

SERVER = Path(__file__).parents[2] / ".venv-clients/bin/moto_server"
pytestmark = pytest.mark.skipif(not SERVER.exists(), reason="needs moto (make test-tools)")
PART = bytes(range(256)) * 4096


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[str]]:
    command = [str(SERVER), "-H", "127.0.0.1", "-p", "0"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stderr=pipe, stdout=subprocess.DEVNULL, text=True) as process:
        assert process.stderr is not None
        address = next(x for x in process.stderr if "Running on" in x).split()[-1]
        for name, value in (
            ("AWS_ENDPOINT_URL", address),
            ("AWS_ACCESS_KEY_ID", "key"),
            ("AWS_SECRET_ACCESS_KEY", "secret"),
            ("AWS_REGION", "us-east-1"),
        ):
            monkeypatch.setenv(name, value)
        urllib.request.urlopen(urllib.request.Request(f"{address}/bucket", method="PUT")).close()
        yield process
        process.kill()


def make(folder: Path, bucket: str = "bucket") -> Store:
    config = StoreConfig(database=str(folder), files=f"s3://{bucket}/some/prefix")
    return make_store(config, folder, "router")


@pytest.mark.usefixtures("server")
async def test_files_are_written_read_and_deleted(tmp_path: Path) -> None:
    store = make(tmp_path)
    upload = await store.files.upload("acme")
    for _ in range(12):
        await upload.write(PART)
    file = await store.files.keep(upload, "acme", "in.jsonl")
    assert not upload.path.exists()
    assert b"".join([chunk async for chunk in store.files.chunks(file)]) == 12 * PART
    await store.files.delete(file)
    with pytest.raises(NotFound):
        await store.files.open(file)
    await store.files.close()
    await store.database.close()


async def test_an_unreachable_bucket_fails_the_upload_and_keeps_nothing(
    server: subprocess.Popen[str], tmp_path: Path
) -> None:
    store = make(tmp_path)
    upload = await store.files.upload("acme")
    await upload.write(PART)
    server.kill()
    server.wait(WAIT_S)
    with pytest.raises(StoreUnavailable):
        await store.files.keep(upload, "acme", "in.jsonl")
    assert not upload.path.exists()
    assert await store.files.files("acme", None, 10, None) == ([], False)
    await store.files.close()
    await store.database.close()


@pytest.mark.usefixtures("server")
def test_a_missing_bucket_fails_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        make(tmp_path, "another")
    assert raised.value.field == "store.files"
