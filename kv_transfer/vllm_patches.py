"""Two corrections to vLLM's model runner V1, the one that runs on CPU. Tried on vLLM 0.32.0.

1. A new request starts there with no output tokens. One that continues tokens generated elsewhere
gets
   them here. (Runner V2, on GPU, reads them from the request.)
2. After a partial prefill chunk the runner takes back the random number that it drew too many:
   `generator.set_offset(generator.get_offset() - 4)`. A CPU generator has no offset and raises,
   which ends the engine. `SeededGenerator` answers by its own count: the CPU sampler draws one
   number a sampled token (v1/sample/ops/topk_topp_sampler.py), so its state is a function of the
   seed and the number of tokens.

Both are one wrapper around the name `CachedRequestState` in vllm.v1.worker.gpu_model_runner.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import MutableMapping


class SeededGenerator(torch.Generator):
    """A CPU generator that stands behind `len(tokens)` draws and can be put back there."""

    def bind(self, seed: int, tokens: list[int]) -> SeededGenerator:
        """`tokens` is the request's live list of output tokens."""
        self._seed = seed
        self._tokens = tokens
        self.set_offset(0)
        return self

    def get_offset(self) -> int:
        """What the runner subtracts again."""
        return 4

    def set_offset(self, offset: int) -> torch.Generator:
        """Back to where the tokens so far have left it."""
        self.manual_seed(self._seed)
        if self._tokens:
            torch.randint(0, 2**31, (len(self._tokens),), generator=self, dtype=torch.long)
        return self


class _StateFactory:
    """Stands in for CachedRequestState; `resumed` maps request ids to tokens generated
    elsewhere."""

    def __init__(self, original: Any, resumed: MutableMapping[str, list[int]]) -> None:
        self.original = original
        self.resumed = resumed

    def __call__(self, **values: Any) -> Any:
        tokens = self.resumed.pop(values["req_id"], None)
        if tokens:
            values["output_token_ids"] = list(tokens)
        generator = values.get("generator")
        if generator is not None and generator.device.type == "cpu":
            values["generator"] = SeededGenerator().bind(
                values["sampling_params"].seed, values["output_token_ids"]
            )
        return self.original(**values)


def patch_runner_v1(resumed: MutableMapping[str, list[int]] | None = None) -> None:
    """Idempotent. `resumed`, when given, becomes the map that the runner reads."""
    from vllm.v1.worker import gpu_model_runner as runner

    current: Any = runner.CachedRequestState
    if isinstance(current, _StateFactory):
        if resumed is not None:
            current.resumed = resumed
        return
    factory: Any = _StateFactory(current, {} if resumed is None else resumed)
    runner.CachedRequestState = factory
