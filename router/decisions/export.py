"""Recorded decisions as JSON Lines: protobuf's JSON of what `Admin.Explain` says, in its order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from google.protobuf import json_format

from pdserve import wire
from pdserve.errors import InvalidRequest, PdserveError
from pdserve.v1 import admin_pb2 as a
from router.decisions.record import given_from_pb

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pdserve.types import WorkerInfo
    from router.decisions.record import Given


def read_lines(lines: Iterable[str], source: str) -> Iterator[Given]:
    """The decisions of an export, which errors call `source`. Raises PdserveError naming the
    line."""
    workers: dict[str, WorkerInfo] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            message = json_format.Parse(line, a.Explained())
            if message.HasField("worker"):
                info = wire.worker_from_pb(message.worker)
                workers[info.worker_id] = info
            yield from given_from_pb(message.request, workers)
        except json_format.ParseError as error:
            raise PdserveError(f"{source}, line {number}: {error}") from error
        except InvalidRequest as error:
            where = f"{error.field}: " if error.field else ""
            raise PdserveError(f"{source}, line {number}: {where}{error.message}") from error
