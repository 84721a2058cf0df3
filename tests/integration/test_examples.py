"""Programs in examples/, at a service with fake engines."""

from __future__ import annotations

import runpy

import pytest

from tests.support.cluster import Cluster
from tests.support.commands import ROOT


async def test_the_pauses_of_each_stream_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    async with Cluster(prefill=1, decode=1) as cluster:
        await runpy.run_path(str(ROOT / "examples" / "stall.py"))["main"](cluster.grpc)
    first, second, prompt = capsys.readouterr().out.splitlines()
    assert first.startswith("stream 1: longest pause ")
    assert second.startswith("stream 2: longest pause ")
    assert "prefill on prefill-0, decode on decode-0, request gen-" in prompt


async def test_a_service_without_a_model_is_refused() -> None:
    async with Cluster(prefill=0, decode=0) as cluster:
        with pytest.raises(SystemExit, match="serves no model"):
            await runpy.run_path(str(ROOT / "examples" / "stall.py"))["main"](cluster.grpc)
