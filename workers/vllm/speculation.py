"""Speculative decoding. Tried on vLLM 0.32.0 (CPU): n-gram, draft model, EAGLE, MTP;
suffix with arctic-inference 0.3.0.

n-gram and suffix speculation have no KV of their own, so decode workers alone can use them.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch


# Sampling parameters that vLLM does not apply to tokens that it checks.
UNSUPPORTED_FIELDS = ("min_p", "logit_bias")
# By method: the module it imports, and the package that has it.
_PACKAGES = {"ngram": ("numba", "numba"), "suffix": ("arctic_inference", "arctic-inference")}


def check_packages(speculative_config: Mapping[str, Any]) -> None:
    """Raise ConfigError naming the package that the method lacks."""
    # Without a method, vLLM takes these names of a model for one (config/speculative.py).
    method = str(speculative_config.get("method") or speculative_config.get("model")).strip("[]")
    module, package = _PACKAGES.get(method, ("", ""))
    if module and find_spec(module) is None:
        raise ConfigError(
            f"engine_args.speculative_config: method {method} needs the package {package}: "
            f"pip install {package}",
            field="engine_args.speculative_config",
        )


def mend_sampling(worker: Any) -> None:
    """Make sampled requests right on a CPU; runs in each process that has a model.

    vLLM's CPU kernel expands temperature, top_k and top_p into a copy, so the sampler reads memory
    that nobody wrote (vllm#55005, v1/sample/rejection_sampler.py `expand_batch_to_tokens`).
    """
    import torch
    from vllm.v1.sample import rejection_sampler

    del worker  # vLLM passes it
    ends = torch.tensor([1, 3], dtype=torch.int32)
    found = rejection_sampler.expand_batch_to_tokens(torch.tensor([0.5, 0.25]), ends, 3)
    if found.tolist() != [0.5, 0.25, 0.25]:
        rejection_sampler.expand_batch_to_tokens = _expanded


def _expanded(
    x: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    num_tokens: int,
    replace_from: float = 0,
    replace_to: float = 0,
) -> torch.Tensor:
    """Repeat each request's value for each of its tokens, as `expand_batch_to_tokens` should."""
    counts = cu_num_tokens.long().diff(prepend=cu_num_tokens.new_zeros(1))
    values = x.masked_fill(x == replace_from, replace_to)
    return values.repeat_interleave(counts, output_size=num_tokens)
