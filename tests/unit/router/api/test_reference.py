"""docs/api.md is what the structs say, and names what the router serves."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from router.api.openapi import ENDPOINTS, GETS
from router.api.reference import as_markdown

if TYPE_CHECKING:
    from scripted import Apis


def test_the_document_is_what_the_structs_say() -> None:
    path = Path(__file__).parents[4] / "docs" / "api.md"
    assert path.read_text(encoding="utf-8") == as_markdown(), "run `make docs`"


async def test_every_endpoint_of_the_document_is_served_with_its_method(apis: Apis) -> None:
    for endpoint in ENDPOINTS:
        path = endpoint.path.replace("{model}", "demo")
        if "files" in path or "batches" in path or "{" in path:
            continue  # this router has no batches, and nothing is stored
        status = 200 if endpoint.method == "GET" else 400
        async with apis.session.request(endpoint.method, apis.url + path, data=b"") as response:
            assert response.status == status, path


async def test_every_path_that_is_served_is_in_the_document(apis: Apis) -> None:
    async with apis.session.get(f"{apis.url}/openapi.json") as response:
        described = set((await response.json())["paths"])
    assert described == {*GETS, *(x.path for x in ENDPOINTS if x.body is not None)}
