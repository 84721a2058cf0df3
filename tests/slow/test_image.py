"""The router's image: built by Debian's buildah on a base made by mmdebstrap, and run. Needs root,
Debian's mirror and PyPI."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.commands import copy_sources, run
from tests.support.timeouts import WAIT_S

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

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
mount -t tmpfs -o mode=1777 tmp "$root/tmp"
exec chroot --userspec="$user" "$root" env -i "$@"
"""


class Image:
    """Build an image in a separate storage of buildah."""

    def __init__(self, folder: Path) -> None:
        self._storage = [f"--root={folder}/storage", f"--runroot={folder}/run"]
        self._folder = folder

    def build(self) -> None:
        base = self._folder / "base.tar"
        self._run("mmdebstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm", base)
        container = self._buildah("from", "scratch")
        self._buildah("add", container, base, "/")
        self._buildah("commit", container, "localhost/python")
        sources = self._folder / "sources"
        copy_sources(sources)
        self._buildah(
            "bud",
            "--isolation=chroot",
            "--network=host",
            "--target=router",
            # The certificates that pip trusts, and the base, are those of this machine.
            "--volume=/etc/ssl/certs:/etc/ssl/certs:ro",
            "--build-arg=PYTHON=localhost/python",
            "--tag=pdserve-router",
            f"--file={sources}/deploy/Dockerfile",
            sources,
        )
        self._container = self._buildah("from", "localhost/pdserve-router")
        found = json.loads(self._buildah("inspect", "--type=image", "localhost/pdserve-router"))
        self.config: dict[str, Any] = found["OCIv1"]["config"]

    def start(self, *args: str) -> subprocess.Popen[str]:
        """Run the image with its entry point."""
        script = ["sh", "-c", IN_IMAGE, "sh", *self._storage, self._container, self.config["User"]]
        return subprocess.Popen(
            [*ALONE, *script, *self.config["Env"], *self.config["Entrypoint"], *args],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def _buildah(self, *args: object) -> str:
        return self._run("buildah", *self._storage, *args).strip()

    def _run(self, *command: object) -> str:
        return run(*ALONE, *command, within_s=BUILD_S)


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    if os.geteuid():
        pytest.skip("needs root")
    for program in ("buildah", "mmdebstrap", "unshare"):
        if shutil.which(program) is None:
            pytest.skip(f"needs {program}")
    folder = tmp_path_factory.mktemp("image")
    found = Image(folder)
    try:
        found.build()
        yield found
    finally:
        shutil.rmtree(folder)


def test_the_image_serves_as_its_user_with_a_root_that_is_read_only(image: Image) -> None:
    assert image.config["User"] == "10001:10001"
    assert image.config["Cmd"][0] == "router"
    running = image.start("router", "--http-port=0", "--grpc-port=0")
    try:
        assert running.stdout is not None
        url = next(
            found[1] for x in running.stdout if (found := re.search(r"HTTP at (http:\S+)", x))
        )
        with urllib.request.urlopen(f"{url}/health", timeout=WAIT_S) as answer:
            assert answer.status == 200
        running.terminate()
        rest, _ = running.communicate(timeout=WAIT_S)
        assert running.returncode == 0, rest
    finally:
        running.kill()
        running.communicate()


def test_the_image_has_the_scaler(image: Image) -> None:
    text, _ = image.start("scaler", "--on=kubernetes", "--decode=1:2").communicate(timeout=WAIT_S)
    assert "no Kubernetes cluster" in text
