"""Speculative decoding. Tested with vLLM 0.32.0 (CPU): n-gram, draft model, EAGLE, MTP;
suffix with arctic-inference 0.3.0.

N-gram and suffix speculation have no KV, so decode workers can use them while prefill workers do
not.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch


# Sampling parameters that vLLM ignores when it verifies speculative tokens.
_IGNORED_FIELDS = ("min_p", "logit_bias")
# Method -> (module that it imports, package that contains the module).
_PACKAGES = {"ngram": ("numba", "numba"), "suffix": ("arctic_inference", "arctic-inference")}


def unsupported_fields(*, speculates: bool, is_runner_v1_on_gpu: bool) -> tuple[str, ...]:
    """Return the sampling parameters that an engine refuses. Workers register them, so that the
    router refuses them before prefill. vLLM's model runner V1 on a GPU, which it uses for suffix
    speculation, cannot continue a seeded request exactly, because kernels determine how far a token
    advances the generator.
    """
    return (_IGNORED_FIELDS if speculates else ()) + (("seed",) if is_runner_v1_on_gpu else ())


def check_packages(speculative_config: Mapping[str, Any]) -> None:
    """Raise ConfigError if the package of the method is missing, with its name."""
    # Without `method`, vLLM accepts these names as the model (config/speculative.py).
    method = str(speculative_config.get("method") or speculative_config.get("model")).strip("[]")
    module, package = _PACKAGES.get(method, ("", ""))
    if module and find_spec(module) is None:
        raise ConfigError(
            f"engine_args.speculative_config: method {method} needs the package {package}: "
            f"pip install {package}",
            field="engine_args.speculative_config",
        )


def mend_sampling(worker: Any) -> None:
    """Correct speculative sampling on a CPU. Runs in each process that has a model.

    vLLM's CPU kernel expands temperature, top_k and top_p into a copy, so the sampler reads memory
    that was never written (vllm#55005, v1/sample/rejection_sampler.py `expand_batch_to_tokens`).
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
