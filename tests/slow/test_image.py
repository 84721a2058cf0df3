"""The images of the router and of workers for CPUs: built by Debian's buildah on a base made by
mmdebstrap, and run. Needs root, Debian's mirror and PyPI; the worker's image also a torch for CPUs,
from TORCH_INDEX or a folder PIP_FIND_LINKS."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from tests.support.commands import copy_sources, run
from tests.support.timeouts import START_S, WAIT_S, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

BUILD_S = 900
ALONE = ("unshare", "--mount")  # the mounts of a command are gone when it ends
PACKAGES = "ca-certificates,python3,python3-pip,python3-venv"
# Becomes a command in the image: with a root that nobody can write to, and as the image's user.
IN_IMAGE = """
set -eu
root=$(buildah "$1" "$2" mount "$3"); user=$4; shift 4
mount --bind "$root" "$root"
mount -o remount,bind,ro "$root"
mount --rbind /proc "$root/proc"
mount --rbind /dev "$root/dev"
mount --rbind /sys "$root/sys"
mount -t tmpfs -o mode=1777 tmp "$root/tmp"
mount -t tmpfs -o mode=1777 home "$root/home/pdserve"
exec chroot --userspec="$user" "$root" env -i "$@"
"""


class Images:
    """Build images in a separate storage of buildah, in `folder`, which is empty."""

    def __init__(self, folder: Path) -> None:
        self._storage = [f"--root={folder}/storage", f"--runroot={folder}/run"]
        base = folder / "base.tar"
        self._run("mmdebstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm", base)
        container = self._buildah("from", "scratch")
        self._buildah("add", container, base, "/")
        self._buildah("commit", container, "localhost/python")
        self._sources = folder / "sources"
        copy_sources(self._sources)

    def build(self, target: str, *options: str) -> Image:
        name = f"localhost/pdserve-{target}"
        self._buildah(
            "bud",
            "--layers",  # the stage that makes the wheel runs once
            "--isolation=chroot",
            "--network=host",
            f"--target={target}",
            # The certificates that pip trusts, and the base, are those of this machine.
            "--volume=/etc/ssl/certs:/etc/ssl/certs:ro",
            "--build-arg=PYTHON=localhost/python",
            *options,
            f"--tag={name}",
            f"--file={self._sources}/deploy/Dockerfile",
            self._sources,
        )
        found = json.loads(self._buildah("inspect", "--type=image", name))
        return Image(self._storage, self._buildah("from", name), found["OCIv1"]["config"])

    def _buildah(self, *args: object) -> str:
        return self._run("buildah", *self._storage, *args).strip()

    def _run(self, *command: object) -> str:
        return run(*ALONE, *command, within_s=BUILD_S)


@dataclass
class Image:
    _storage: list[str]
    _container: str
    config: dict[str, Any]

    @contextmanager
    def running(self, log: Path, *args: str) -> Iterator[subprocess.Popen[bytes]]:
        """Run the image with its entry point, and write its output to `log`. Kill it at the end."""
        script = ["sh", "-c", IN_IMAGE, "sh", *self._storage, self._container, self.config["User"]]
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*ALONE, *script, *self.config["Env"], *self.config["Entrypoint"], *args],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def stop(process: subprocess.Popen[bytes], log: Path) -> None:
    """Tell the program to stop, and assert that it ends well."""
    process.terminate()
    assert process.wait(WAIT_S) == 0, log.read_text()


async def addresses(log: Path) -> tuple[str, str]:
    """Return the URL and the gRPC address of a router once it has written them."""
    where = r"HTTP at (http:\S+) and gRPC at (\S+)"
    found = await wait_until(lambda: re.search(where, log.read_text()))
    return found[1], found[2]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Images]:
    if os.geteuid():
        pytest.skip("needs root")
    for program in ("buildah", "mmdebstrap", "unshare"):
        if shutil.which(program) is None:
            pytest.skip(f"needs {program}")
    folder = tmp_path_factory.mktemp("images")
    try:
        yield Images(folder)
    finally:
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def router(images: Images) -> Image:
    return images.build("router")


@pytest.fixture(scope="module")
def worker(images: Images, tmp_path_factory: pytest.TempPathFactory) -> Image:
    index, wheels = os.environ.get("TORCH_INDEX", ""), os.environ.get("PIP_FIND_LINKS", "")
    if not index and not Path(wheels).is_dir():
        pytest.skip("needs TORCH_INDEX, or PIP_FIND_LINKS with a folder")
    # pip asks the index that is named even if the folder has the wheel.
    options = [f"--build-arg=TORCH_INDEX={index or 'https://pypi.org/simple'}"]
    if wheels:
        config = tmp_path_factory.mktemp("pip") / "pip.conf"
        config.write_text(f"[global]\nfind-links = {wheels}\n")
        options += [f"--volume={wheels}:{wheels}:ro", f"--volume={config}:/etc/pip.conf:ro"]
    return images.build("worker-cpu", "--build-arg=TORCH_LOCKS=torch-cpu", *options)


async def test_the_router_serves_as_its_user_with_a_root_that_is_read_only(
    router: Image, tmp_path: Path
) -> None:
    assert router.config["User"] == "10001:10001"
    assert router.config["Cmd"][0] == "router"
    log = tmp_path / "router.log"
    with router.running(log, "router", "--http-port=0", "--grpc-port=0") as process:
        url, _ = await addresses(log)
        async with aiohttp.ClientSession(url) as client, client.get("/health") as answer:
            assert answer.status == 200
        stop(process, log)


def test_the_routers_image_has_the_scaler(router: Image, tmp_path: Path) -> None:
    log = tmp_path / "scaler.log"
    with router.running(log, "scaler", "--on=kubernetes", "--decode=1:2") as process:
        process.wait(WAIT_S)
    assert "no Kubernetes cluster" in log.read_text()


async def test_workers_for_cpus_answer_with_a_hand_over(
    router: Image, worker: Image, tmp_path: Path
) -> None:
    assert worker.config["User"] == "10001:10001"
    assert worker.config["Cmd"] == ["worker"]
    log = tmp_path / "router.log"
    body = {"model": "pdserve-demo", "prompt": "Prefill and decode", "max_tokens": 8}
    with ExitStack() as stack:
        stack.enter_context(router.running(log, "router", "--http-port=0", "--grpc-port=0"))
        url, grpc = await addresses(log)
        options = ("--model=/models/demo", "--model-name=pdserve-demo", "--port=0")
        logs = {x: tmp_path / f"{x}.log" for x in ("prefill", "decode")}
        workers = {
            log: stack.enter_context(
                worker.running(log, "worker", f"--role={role}", f"--router={grpc}", *options)
            )
            for role, log in logs.items()
        }
        async with aiohttp.ClientSession(url) as client:

            def are_registered() -> bool:
                for log, process in workers.items():
                    assert process.poll() is None, log.read_text()
                return all("registered with router" in log.read_text() for log in workers)

            # /ready is not enough: one worker alone computes a whole answer.
            await wait_until(are_registered, within_s=START_S, pause_s=0.5)
            async with client.post("/v1/completions", json=body) as answer:
                found = await answer.json()
                assert answer.status == 200, found
        assert found["usage"]["completion_tokens"] > 0, json.dumps(found)
        assert found["pdserve"]["receipt"]["transfer_blocks"] > 0, json.dumps(found)
        for log, process in workers.items():
            stop(process, log)
