"""Submit commands: what a worker is told of a request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve import deadline as deadlines
from pdserve import wire
from pdserve.v1 import worker_pb2 as w

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.types import GenerateRequest
    from router.member import Member

# A deadline that has just passed must not read as none.
LEAST_DEADLINE_S = 0.001
# What a submission does not have from the one before it.
_OF_ONE_LEG = ("phase", "resume_token_ids", "forks")


class SubmissionBuilder:
    """Encodes one request once, however many workers are told of it, and not before one is: an
    answer that forks from another may never be submitted by itself."""

    __slots__ = ("_base", "_deadline", "_request")

    def __init__(self, request: GenerateRequest, deadline: float | None) -> None:
        self._deadline = deadline
        self._request = request
        self._base: w.Submit | None = None  # the first that was made

    def prefill(self, transfer_id: str, resume: Sequence[int] = ()) -> w.Command:
        """Compute KV and the token after `resume`; hold the blocks for whoever presents
        `transfer_id`."""
        command = self._start(resume)
        command.submit.prefill.transfer_id = transfer_id
        return command

    def decode(
        self,
        transfer_id: str,
        source: Member,
        target: Member,
        *,
        resume: Sequence[int] = (),
        kv_handle: bytes = b"",
        live: bool = False,
    ) -> w.Command:
        """`target` shall receive from `source` KV and the token after `resume`, by a right that
        only it has, and go on. Where the handoff is in turn, prefill's token is the last of
        `resume`, and `kv_handle` is what prefill has said of its KV. A `live` source has decoded
        all of `resume`."""
        if source.info.kv is None:
            raise AssertionError(f"worker {source.worker_id} was paired without a kv endpoint")
        command = self._start(resume)
        decode = command.submit.decode
        decode.transfer_id = transfer_id
        decode.producer_addresses.extend(source.info.kv.addresses)
        decode.producer_instance_id = source.info.instance_id
        decode.kv_handle = kv_handle
        decode.live = live
        return command

    def whole(self, resume: Sequence[int] = ()) -> w.Command:
        """Both phases on one worker, going on after the tokens of `resume`."""
        command = self._start(resume)
        command.submit.aggregated.SetInParent()
        return command

    def _start(self, resume: Sequence[int]) -> w.Command:
        # Made where it is: to put one message into another copies the prompt once more.
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
            for name in _OF_ONE_LEG:
                submit.ClearField(name)
        submit.resume_token_ids.extend(resume)
        left_s = deadlines.remaining(self._deadline)
        if left_s is not None:
            submit.deadline_s = max(left_s, LEAST_DEADLINE_S)
        return command
