"""Valid and invalid requests of our own OpenAPI document to a whole service. Each is answered as
documented, with no status 500 and no crash."""

from __future__ import annotations

import asyncio
import contextlib
import tracemalloc
from typing import TYPE_CHECKING, Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance

from pdserve.types import SamplingParams
from tests.support.cluster import Cluster
from tests.support.timeouts import WAIT_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

# aiohttp's reader of multipart bodies gives them: of wrong headers, and of itself.
pytestmark = [
    pytest.mark.filterwarnings("ignore::aiohttp.multipart.BadContentDispositionHeader"),
    pytest.mark.filterwarnings("ignore::aiohttp.multipart.BadContentDispositionParam"),
    pytest.mark.filterwarnings("ignore:unread_data:DeprecationWarning"),
]
EXAMPLES = settings(max_examples=15, suppress_health_check=list(HealthCheck), deadline=None)
SHORT = {"model": "pdserve-demo", "max_tokens": 3, "max_completion_tokens": 3}


def fuzz(address: str) -> set[int]:
    """Return the statuses of the responses."""
    schema = schemathesis.openapi.from_url(f"http://{address}/openapi.json", wait_for_schema=WAIT_S)
    seen: set[int] = set()
    for found in schema.get_all_operations():
        operation = found.ok()
        fuzz_operation(operation, GenerationMode.POSITIVE, seen)
        if operation.body:
            fuzz_operation(operation, GenerationMode.NEGATIVE, seen)
            fuzz_bytes(f"http://{address}{operation.path}")
    return seen


def fuzz_operation(operation: Any, mode: GenerationMode, seen: set[int]) -> None:
    """Draw a body that the document allows or forbids."""

    @EXAMPLES
    @given(operation.as_strategy(generation_mode=mode))
    def structured(case: Any) -> None:
        if isinstance(case.body, dict):
            case.body |= {name: x for name, x in SHORT.items() if name in case.body}
        response = case.call(timeout=WAIT_S)
        seen.add(response.status_code)
        # Some fields rule each other out, which the document does not say.
        case.validate_response(response, excluded_checks=[positive_data_acceptance])

    structured()


def fuzz_bytes(url: str) -> None:
    """Draw bytes, most of which are no JSON."""

    @EXAMPLES
    @given(st.binary(max_size=64))
    def unstructured(body: bytes) -> None:
        kind = {"Content-Type": "application/json"}
        response = requests.post(url, body, headers=kind, timeout=WAIT_S)
        assert 400 <= response.status_code < 500, response.text
        parts = {"message", "type"} if "/messages" in url else {"message", "type", "param", "code"}
        assert parts <= set(response.json()["error"])

    unstructured()


async def test_every_answer_is_one_that_the_document_knows() -> None:
    async with Cluster(aggregated=1) as cluster:
        seen = await asyncio.to_thread(fuzz, cluster.http)
        assert {200, 400} <= seen
        answer = await cluster.ask([1, 2, 3], SamplingParams(max_tokens=4, ignore_eos=True))
        assert len(answer.token_ids) == 4


BOUNDARY = "b" * 70  # the longest that there is
NAMES = st.sampled_from([b"file", b"purpose", b"_charset_", b"expires_after[seconds]"])
HEADERS = st.one_of(
    NAMES.map(lambda name: b'Content-Disposition: form-data; name="%s"' % name),
    NAMES.map(lambda name: b'Content-Disposition: form-data; name="%s"; filename="f"' % name),
    st.binary(max_size=20).map(lambda x: b'Content-Disposition: form-data; name="%s"' % x),
    st.binary(max_size=20).map(lambda x: b'Content-Disposition: x; name="file"; filename="%s"' % x),
    st.sampled_from(
        [b"multipart/mixed", b"multipart/mixed; boundary=c", b"text/plain", b"\xff"]
    ).map(lambda kind: b"Content-Type: " + kind),
    st.sampled_from([b"base64", b"unheard-of", b"binary"]).map(
        lambda encoding: b"Content-Transfer-Encoding: " + encoding
    ),
    st.sampled_from([b"Content-Length: 3", b"Content-Length: -1", b"Content-Encoding: gzip"]),
    st.integers(1, 300).map(lambda count: b"\r\n".join([b"X-Header: x"] * count)),
    st.integers(1, 20_000).map(lambda size: b"X-Header: " + b"x" * size),
    st.binary(max_size=20),
)
VALUES = st.one_of(st.just(b"batch"), st.just(b"{}\n"), st.binary(max_size=200))
PARTS = st.one_of(
    st.just(b'Content-Disposition: form-data; name="file"; filename="f"\r\n\r\n{}\n'),
    st.just(b'Content-Disposition: form-data; name="purpose"\r\n\r\nbatch'),
    st.tuples(st.lists(HEADERS, max_size=3), VALUES).map(
        lambda part: b"\r\n".join([*part[0], b"", part[1]])
    ),
)


@st.composite
def multipart_bodies(draw: st.DrawFn) -> bytes:
    """Draw a multipart body with known and unknown headers; its end may be missing."""
    start = b"\r\n--" + BOUNDARY.encode()
    parts = draw(st.lists(PARTS, max_size=4))
    preamble = draw(st.one_of(st.just(b""), st.binary(max_size=20), st.just(b"x" * (1 << 18))))
    body = preamble + b"".join(start + b"\r\n" + part for part in parts) + start + b"--\r\n"
    return body[: draw(st.integers(0, len(body)))] if draw(st.booleans()) else body


def upload(address: str, body: bytes | Iterator[bytes]) -> requests.Response:
    kind = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"}
    return requests.post(f"http://{address}/v1/files", body, headers=kind, timeout=WAIT_S)


@contextlib.asynccontextmanager
async def accepting_files(folder: Path) -> AsyncIterator[str]:
    async with Cluster(router={"store": {"database": str(folder)}}) as cluster:
        yield cluster.http


async def test_an_upload_is_a_file_or_a_400_that_names_its_field(tmp_path: Path) -> None:
    @settings(EXAMPLES, max_examples=300)
    @given(multipart_bodies())
    def fuzz_uploads(body: bytes) -> None:
        response = upload(address, body)
        seen.add(response.status_code)
        if response.status_code != 200:
            assert response.status_code == 400, response.text
            assert response.json()["error"]["param"]

    seen: set[int] = set()
    async with accepting_files(tmp_path) as address:
        await asyncio.to_thread(fuzz_uploads)
    assert seen == {200, 400}


@pytest.mark.parametrize("name", ["file", "purpose"])
async def test_an_upload_of_any_size_takes_little_memory(name: str, tmp_path: Path) -> None:
    def body() -> Iterator[bytes]:
        yield f"--{BOUNDARY}\r\nContent-Disposition: form-data; name={name}\r\n\r\n".encode()
        for _ in range(64):
            yield megabyte
        yield f"\r\n--{BOUNDARY}--\r\n".encode()

    megabyte = b"x" * (1 << 20)
    async with accepting_files(tmp_path) as address:
        tracemalloc.start()
        try:
            response = await asyncio.to_thread(upload, address, body())
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert response.json()["error"]["param"] == "purpose"
    assert peak < 16 << 20
