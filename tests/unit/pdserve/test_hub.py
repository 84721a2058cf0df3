"""Models by name, from a hub that speaks the protocol of the Hugging Face hub over HTTP."""

from __future__ import annotations

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

import pytest
from huggingface_hub import constants

from pdserve.config import WorkerConfig
from pdserve.errors import ConfigError
from pdserve.model import hub
from pdserve.model.hub import model_directory, with_directories

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TOKEN = "hf_secret"
FILES = {
    "org/safe": [
        "config.json",
        "model.safetensors",
        "pytorch_model.bin",
        "original/consolidated.pth",
    ],
    "org/pickled": ["config.json", "pytorch_model.bin"],
    "org/private": ["config.json", "model.safetensors"],
    "org/draft": ["config.json", "model.safetensors"],
}
REVISIONS = {"main": "a" * 40, "v2": "b" * 40}


class Hub(BaseHTTPRequestHandler):
    """Holds FILES at two revisions; each file's content is its name. Counts downloads."""

    protocol_version = "HTTP/1.1"
    sent: list[str]

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        parts = self.path.partition("?")[0].strip("/").split("/")
        is_api = parts[:2] == ["api", "models"]
        org, name, kind, revision, *path = [*(parts[2:] if is_api else parts), "", "", ""][:20]
        repo, file = f"{org}/{name}", "/".join(path).rstrip("/")
        commit = REVISIONS.get(revision) or (revision if revision in REVISIONS.values() else "")
        if repo not in FILES:
            return self.refuse(404, "RepoNotFound")
        if repo == "org/private" and self.headers.get("authorization") != f"Bearer {TOKEN}":
            return self.refuse(403, "GatedRepo")
        if not commit:
            return self.refuse(404, "RevisionNotFound")
        if kind == "revision":
            return self.answer(json.dumps({"id": repo, "sha": commit, "siblings": []}))
        if kind == "tree":
            entries = [
                {"type": "file", "path": x, "size": len(x), "oid": self.etag(x)}
                for x in FILES[repo]
            ]
            return self.answer(json.dumps(entries))
        if self.command == "GET":
            self.sent.append(f"{repo}/{file}")
        return self.answer(file, {"etag": f'"{self.etag(file)}"', "x-repo-commit": commit})

    def etag(self, file: str) -> str:
        return hashlib.sha1(file.encode()).hexdigest()

    def refuse(self, status: int, code: str) -> None:
        self.answer("{}", {"x-error-code": code}, status)

    def answer(self, text: str, headers: dict[str, str] | None = None, status: int = 200) -> None:
        body = text.encode()
        self.send_response(status)
        for key, value in {"content-length": str(len(body)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Serve the hub with an empty cache. Return the list of downloaded files."""
    files: list[str] = []
    handler = type("OneHub", (Hub,), {"sent": files})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", url)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    hub._download.cache_clear()
    try:
        yield files
    finally:
        hub._download.cache_clear()
        server.shutdown()
        thread.join()
        server.server_close()


def names_in(directory: Path) -> set[str]:
    return {str(x.relative_to(directory)) for x in directory.rglob("*") if x.is_file()}


def test_a_mistyped_name_of_ours_gets_a_hint(sent: list[str]) -> None:
    del sent
    with pytest.raises(ConfigError, match=r"cannot get dmeo: .*; did you mean demo"):
        model_directory("dmeo")


def test_a_model_of_the_hub_is_downloaded_once_without_what_vllm_does_not_load(
    sent: list[str],
) -> None:
    directory = model_directory("org/safe")
    assert names_in(directory) == {"config.json", "model.safetensors"}
    assert sorted(sent) == ["org/safe/config.json", "org/safe/model.safetensors"]
    hub._download.cache_clear()  # as another process
    assert model_directory("org/safe") == directory
    assert len(sent) == 2
    assert names_in(model_directory("org/pickled")) == {"config.json", "pytorch_model.bin"}


def test_a_revision_is_another_directory(sent: list[str]) -> None:
    assert model_directory("org/safe@v2").name == REVISIONS["v2"]
    assert model_directory("org/safe").name == REVISIONS["main"]


def test_a_token_gives_access(sent: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"accept its terms at .*/org/private and set HF_TOKEN"):
        model_directory("org/private")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert "config.json" in names_in(model_directory("org/private"))


def test_a_worker_has_directories_for_all_its_models(sent: list[str]) -> None:
    draft = {"model": "org/draft", "num_speculative_tokens": 2}
    args = {"tokenizer": "org/safe", "tokenizer_revision": "v2", "speculative_config": draft}
    worker = with_directories(WorkerConfig(model="org/pickled@v2", engine_args=args))
    assert worker.served_names == ("org/pickled",)
    assert worker.model == str(model_directory("org/pickled@v2"))
    assert worker.engine_args["tokenizer"] == str(model_directory("org/safe@v2"))
    found = worker.engine_args["speculative_config"]
    assert found == {**draft, "model": str(model_directory("org/draft")), "revision": None}
    ngram = {"speculative_config": {"model": "ngram"}}
    assert with_directories(WorkerConfig(engine_args=ngram)).engine_args == ngram
    assert with_directories(worker) == worker


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("org/none", "has no such model, or HF_TOKEN does not give access to it"),
        ("org/safe@v9", "cannot get org/safe@v9: it has no revision v9"),
        ("/nowhere", "/nowhere is not a model directory: it has no config.json"),
    ],
)
def test_a_missing_model_is_refused(sent: list[str], model: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        model_directory(model)
    assert caught.value.field == "worker.model"


def test_without_a_network_the_cache_is_used_and_missing_files_are_named(
    sent: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = model_directory("org/safe")
    (directory / "model.safetensors").unlink()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub._download.cache_clear()
    assert model_directory("org/safe") == directory, "vLLM says which file it lacks"
    with pytest.raises(ConfigError) as caught:
        model_directory("org/draft")
    for words in (
        "org/draft",
        f"{tmp_path}/cache",
        "HF_HUB_OFFLINE is set",
        "hf download org/draft",
    ):
        assert words in caught.value.message
