"""The commands by which a worker is given a request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve import deadline as deadlines
from pdserve import wire
from pdserve.v1 import worker_pb2 as w

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.types import GenerateRequest
    from router.fleet.member import Member

# A deadline that has just passed must not be sent as 0, which means none.
MIN_DEADLINE_S = 0.001


class CommandBuilder:
    """Builds the commands of one request. State: the first command, whose prompt is copied."""

    __slots__ = ("_base", "_deadline", "_request")

    def __init__(self, request: GenerateRequest, deadline: float | None) -> None:
        self._deadline = deadline
        self._request = request
        self._base: w.Submit | None = None

    def prefill(self, transfer_id: str, resume: Sequence[int] = ()) -> w.Command:
        """Compute the KV and the token after `resume`, and hold the blocks for `transfer_id`."""
        command = self._start(resume)
        command.submit.prefill.transfer_id = transfer_id
        return command

    def decode(
        self,
        transfer_id: str,
        producer: Member,
        *,
        resume: Sequence[int] = (),
        kv_handle: bytes = b"",
        live: bool = False,
    ) -> w.Command:
        """Fetch KV from `producer` and continue after `resume`.

        With a sequential handoff the last of `resume` is the token of prefill, and `kv_handle` its
        KV. A `live` producer has decoded all of `resume`.
        """
        assert producer.info.kv is not None, "workers without KV are not paired"
        command = self._start(resume)
        decode = command.submit.decode
        decode.transfer_id = transfer_id
        decode.producer_addresses.extend(producer.info.kv.addresses)
        decode.producer_instance_id = producer.info.instance_id
        decode.kv_handle = kv_handle
        decode.live = live
        return command

    def aggregated(self, resume: Sequence[int] = ()) -> w.Command:
        """Do both phases, and continue after `resume`."""
        command = self._start(resume)
        command.submit.aggregated.SetInParent()
        return command

    def _start(self, resume: Sequence[int]) -> w.Command:
        command = w.Command()
        submit = command.submit
        if self._base is None:
            request = self._request
            submit.request_id = request.request_id
            submit.prompt_token_ids.extend(request.prompt_token_ids)
            submit.traceparent = request.traceparent
            submit.sampling.CopyFrom(wire.sampling_to_pb(request.sampling))
            self._base = submit
        else:
            submit.CopyFrom(self._base)
            submit.ClearField("phase")
            submit.ClearField("resume_token_ids")
        submit.resume_token_ids.extend(resume)
        left_s = deadlines.remaining(self._deadline)
        if left_s is not None:
            submit.deadline_s = max(left_s, MIN_DEADLINE_S)
        return command
