"""docs/api.md and grpc.md are what the code says, and name what the router serves."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from router.api import grpc_reference
from router.api.reference import as_markdown
from router.api.route_table import ROUTES
from router.api.weights import FLUSH_PATHS
from tests.support.router_apis import JSON

if TYPE_CHECKING:
    from tests.support.router_apis import RouterApis


def test_the_document_is_what_the_structs_say() -> None:
    path = Path(__file__).parents[4] / "docs" / "api.md"
    assert path.read_text(encoding="utf-8") == as_markdown(), "run `make docs`"


def test_the_document_of_grpc_is_what_the_protos_say() -> None:
    path = Path(__file__).parents[4] / "docs" / "grpc.md"
    assert path.read_text(encoding="utf-8") == grpc_reference.as_markdown(), "run `make docs`"


# POST without a body is a whole request.
WITHOUT_BODY = {"/ping", *FLUSH_PATHS, "/pause", "/pause_generation", "/resume"}
WITHOUT_BODY |= {"/continue_generation"}


async def test_every_route_is_served_with_its_method(apis: RouterApis) -> None:
    for route in ROUTES:
        path = route.path.replace("{model}", "demo")
        if "{" in path:
            continue  # nothing is stored
        status = 200 if route.method == "GET" or path in WITHOUT_BODY else 400
        url = apis.url + path
        async with apis.session.request(route.method, url, data=b"", headers=JSON) as response:
            assert response.status == status, path


async def test_the_description_for_programs_has_every_json_body(apis: RouterApis) -> None:
    async with apis.session.get(f"{apis.url}/openapi.json") as response:
        described = (await response.json())["paths"]
    for route in ROUTES:
        if route.body is not None:
            content = described[route.path]["post"]["requestBody"]["content"]
            name = content["application/json"]["schema"]["$ref"].rpartition("/")[2]
            assert name == route.body.__name__
