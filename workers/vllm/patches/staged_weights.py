"""Weights that are loaded beside the served ones, so that the change itself only exchanges tensors.
Tested with vLLM 0.32.0 (vllm/model_executor/model_loader/utils.py `initialize_model`,
model_executor/layers/{linear,vocab_parallel_embedding,utils}.py).

vLLM loads weights into a second model, as at a start: it packs them for its kernels, which takes
most of the time of a load. The second model has the structure of the first one and lives until the
exchange. That takes host memory for all weights once more, so it is for models on a CPU, in one
process, of layers whose packed weights are known here. Other models load in the exchange.
"""

from __future__ import annotations

import logging
from copy import copy
from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.platforms import current_platform
from vllm.utils.torch_utils import set_default_torch_dtype

from pdserve.process.memory import free_bytes, weights_bytes
from workers.vllm.patches.reload import read_tensors

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdserve.model.weight_deltas import WeightFiles

_log = logging.getLogger(__name__)

_PACKING = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
# What packing adds to a layer: the function that computes with the packed weight.
_PACKED = "cpu_linear"
# Of the free memory, what weights may take. Packing needs some of a layer's once more.
_SHARE = 0.7


class StagedWeights:
    """A second model, whose tensors are exchanged with those of the first one."""

    def __init__(self, worker: Any, files: WeightFiles) -> None:
        """Call it on the thread that steps, because vLLM's configuration and torch's default type
        are global. Nothing is allocated yet. Raises ValueError for models that cannot be staged,
        and errors of any class from vLLM."""
        self._worker, self.files = worker, files
        self._model = worker.model_runner.get_model()
        # Workers beside this one may load at the same time.
        self._least_free = (1 - _SHARE) * free_bytes()
        _check(worker, files)
        config = copy(worker.vllm_config)
        # Layers register by name.
        compilation = config.compilation_config = copy(config.compilation_config)
        compilation.static_forward_context, compilation.static_all_moe_layers = {}, []
        dtype = config.model_config.dtype
        with set_default_torch_dtype(dtype), torch.device("meta"):
            self._second = initialize_model(config)
        ours, theirs = (_classes(x) for x in (self._model, self._second))
        if ours != theirs:
            raise ValueError("its layers were changed after they were made")

    def load(self) -> None:
        """Load and pack the weights, on any thread. Raises errors of any class."""
        # With a lower priority than the steps it could keep them from the interpreter's lock.
        with torch.no_grad():
            made: dict[torch.Tensor, torch.Tensor] = {}  # tied layers have one tensor
            for layer in self._second.modules():
                for name, tensor in layer._parameters.items():
                    if tensor is not None and tensor.is_meta:
                        if tensor not in made:
                            made[tensor] = materialize_meta_tensor(tensor)
                        layer._parameters[name] = made[tensor]
            loaded = self._second.load_weights(self._read())
            # Nothing else, such as a buffer, because only parameters are exchanged.
            if other := {x for x, _ in self._second.named_parameters()} ^ (loaded or set()):
                raise ValueError(f"{min(other)} is not loaded as a parameter")
            for name, layer in self._second.named_modules():
                if (method := getattr(layer, "quant_method", None)) is not None:
                    before = layer.__dict__.keys() | {_PACKED}
                    method.process_weights_after_loading(layer)
                    if more := layer.__dict__.keys() - before:
                        raise ValueError(f"{name} also has {min(more)}")

    def _read(self) -> Iterator[tuple[str, torch.Tensor]]:
        for named in read_tensors(self._worker, self.files):
            if free_bytes() < self._least_free:
                raise MemoryError(f"less than {int(self._least_free) >> 20} MiB are free")
            yield named

    def exchange(self) -> None:
        """Give the served model the new tensors, on the thread that steps."""
        for layer, new in zip(self._model.modules(), self._second.modules(), strict=True):
            # Whole parameters: layers whose weights were tied may have two from now on.
            layer._parameters.update(new._parameters)
            if _PACKED in new.__dict__:
                setattr(layer, _PACKED, getattr(new, _PACKED))
        runner = self._worker.model_runner
        runner.reset_encoder_cache()
        runner.reset_mm_cache()


def stage_in(worker: Any, files: WeightFiles) -> StagedWeights | None:
    """Return a model into which weights can be loaded; None if that cannot be done here."""
    try:
        return StagedWeights(worker, files)
    except Exception as error:  # noqa: BLE001 - of any class, depending on the model
        _log.info("the weights are loaded while no requests are served: %s", error)
        return None


def _check(worker: Any, files: WeightFiles) -> None:
    """Raise ValueError for a model that cannot be staged."""
    config = worker.vllm_config
    if not current_platform.is_cpu():
        raise ValueError("they would take the memory of the device twice")
    if not config.model_config.enforce_eager or config.parallel_config.world_size > 1:
        raise ValueError("the model is compiled, or in several processes")
    if (size := weights_bytes(files.base)) > _SHARE * free_bytes():
        raise ValueError(f"{size >> 20} MiB of weights fit in the free memory only once")
    for name, layer in worker.model_runner.get_model().named_modules():
        method = getattr(layer, "quant_method", None)
        is_known = method is None or type(method) in _PACKING
        # Attention derives nothing from its weights: it has none. Other layers may.
        derives = hasattr(layer, "process_weights_after_loading") and type(layer) is not Attention
        if not is_known or derives:
            raise ValueError(f"{name} is {type(layer).__name__}")


def _classes(model: torch.nn.Module) -> list[tuple[str, type[torch.nn.Module]]]:
    return [(name, type(layer)) for name, layer in model.named_modules()]
