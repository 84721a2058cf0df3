"""Spans of a request over three processes, as a collector receives them."""

from __future__ import annotations

import http.client
import json
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as collected
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as collecting

from tests.support.commands import ROOT, run
from tests.support.pdserve_up import up
from tests.support.timeouts import WAIT_S

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TRACE = "0af7651916cd43dd8448eb211c80319c"
CALLER = "b7ad6b7169203331"
OTHER_TRACE = "1af7651916cd43dd8448eb211c80319c"


class Collector(collecting.TraceServiceServicer):
    """Spans received, each with the service and the instance that made it."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, str, Any]] = []

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
        for group in request.resource_spans:
            said = {x.key: x.value.string_value for x in group.resource.attributes}
            self.spans += [
                (said["service.name"], said["service.instance.id"], span)
                for scope in group.scope_spans
                for span in scope.spans
            ]
        return collected.ExportTraceServiceResponse()

    def of(self, trace: str) -> dict[str, Any]:
        """Return the spans of one trace by process name and span name."""
        return {
            f"{instance if 'worker' in service else 'router'}/{span.name}": span
            for service, instance, span in self.spans
            if span.trace_id.hex() == trace
        }


@contextmanager
def collector() -> Iterator[tuple[Collector, str]]:
    """Start a collector. Yield it and its endpoint."""
    found = Collector()
    with ThreadPoolExecutor(4) as threads:
        server = grpc.server(threads)
        collecting.add_TraceServiceServicer_to_server(found, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield found, f"http://127.0.0.1:{port}"
        finally:
            server.stop(None).wait()


def ask(address: str, trace: str, body: dict[str, object]) -> bytes:
    """Return the body of an answer. The caller's span is CALLER of `trace`."""
    connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=WAIT_S)
    try:
        headers = {"traceparent": f"00-{trace}-{CALLER}-01", "content-type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        return connection.getresponse().read()
    finally:
        connection.close()


def test_a_request_is_one_tree_of_spans_over_three_processes(tmp_path: Path) -> None:
    with collector() as (found, endpoint):
        options = [f"{who}.otlp_endpoint={endpoint}" for who in ("router", "worker")]
        options += ["worker.engine_args={step_s: 0.02, transfer_s: 0.01}"]
        with up(tmp_path, *(x for option in options for x in ("--set", option))) as running:
            ready = running.wait_until_serving()
            body: dict[str, object] = {"model": "pdserve-demo", "prompt": "one", "max_tokens": 4}
            assert b"length" in ask(ready["http"], TRACE, body)
            refused = body | {"response_format": {"type": "json_object"}}
            assert b"error" in ask(ready["http"], OTHER_TRACE, refused)
            running.send(signal.SIGTERM)
            assert running.wait() == 0, running.output
            assert running.survivors() == []
        prefill, decode = (
            next(x["worker_id"] for x in ready["workers"] if x["role"] == role)
            for role in ("prefill", "decode")
        )
        _check_tree(found.of(TRACE), prefill, decode)
        _check_errors(found.of(OTHER_TRACE))


def _check_tree(spans: dict[str, Any], prefill: str, decode: str) -> None:
    parents = {
        "router/admission": "router/request",
        f"{prefill}/prefill_stream": "router/request",
        f"{decode}/decode_stream": "router/request",
        f"{prefill}/prefill": f"{prefill}/prefill_stream",
        f"{decode}/kv_transfer": f"{decode}/decode_stream",
        f"{decode}/decode": f"{decode}/decode_stream",
    }
    assert spans.keys() >= {"router/request", *parents}
    assert spans["router/request"].parent_span_id.hex() == CALLER
    for name, span in spans.items():
        assert span.status.code == span.status.STATUS_CODE_UNSET, name
        assert span.start_time_unix_nano <= span.end_time_unix_nano, name
        if name == "router/request":
            continue
        # A queue that was not waited in has no span.
        stream = f"{name.partition('/')[0]}/"
        above = parents.get(name) or next(
            x for x in spans if x.startswith(stream) and "_stream" in x
        )
        parent = spans[above]
        assert span.parent_span_id == parent.span_id, name
        assert parent.start_time_unix_nano <= span.start_time_unix_nano, name
        assert span.end_time_unix_nano <= parent.end_time_unix_nano, name


def _check_errors(spans: dict[str, Any]) -> None:
    """Both workers refuse. The first error cancels the other stream."""
    request = spans["router/request"]
    streams = [span for name, span in spans.items() if name.endswith("_stream")]
    assert all(stream.parent_span_id == request.span_id for stream in streams)
    for span in (request, *streams):
        assert span.status.code == span.status.STATUS_CODE_ERROR
    kinds = [_error_type(stream) for stream in streams]
    assert _error_type(request) == "unsupported_parameter"
    assert "unsupported_parameter" in kinds
    assert set(kinds) <= {"unsupported_parameter", "cancelled"}


def _error_type(span: Any) -> str:
    return next(str(x.value.string_value) for x in span.attributes if x.key == "error.type")


def test_a_router_without_an_endpoint_imports_no_telemetry() -> None:
    code = "import sys, router.main; print([m for m in sys.modules if 'opentelemetry' in m])"
    assert run(sys.executable, "-c", code, cwd=ROOT).strip() == "[]"
