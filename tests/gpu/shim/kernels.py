"""The operations of torch that pdserve uses on a GPU, without kernels: each runs on the CPU, over
the same memory, when its stream comes to it."""

from __future__ import annotations

import ctypes
import itertools
import traceback
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map_only

if TYPE_CHECKING:
    from collections.abc import Callable

# Those of copies and digests of KV.
OPERATIONS = (
    "arange.start_step",
    "cat",
    "constant_pad_nd",
    "index_copy_",
    "index_select",
    "index_select.out",
    "mul.Tensor",
    "mul_.Tensor",
    "stack",
    "sum.IntList_out",
    "sum.dim_IntList",
)
_runtime = ctypes.CDLL("libcudart.so.13")
_library = torch.library.Library("aten", "IMPL")
_numbers = itertools.count(1)
_pending: dict[int, Callable[[], object]] = {}  # what streams have not come to yet


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a CPU tensor over the same bytes, which it does not keep alive: as on a GPU, memory
    that is freed too early is seen with what others have written there."""
    if not tensor.is_cuda:
        return tensor
    if not tensor.numel():
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    size = (last + 1) * tensor.element_size()
    buffer = (ctypes.c_uint8 * size).from_address(tensor.data_ptr())
    words = torch.frombuffer(buffer, dtype=torch.uint8).view(tensor.dtype)
    return words.as_strided(tensor.shape, tensor.stride())


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _run(number: int) -> None:
    try:
        # vLLM's tensors are made in this mode, and only there they can be changed.
        with torch.inference_mode():
            _pending.pop(number)()
    except Exception:  # noqa: BLE001 - nobody could take it, in the thread of a stream
        traceback.print_exc()


def enqueue(work: Callable[[], object]) -> None:
    """Call `work` when the current stream comes to it."""
    number = next(_numbers)
    _pending[number] = work
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    if error := _runtime.cudaLaunchHostFunc(stream, _run, ctypes.c_void_p(number)):
        raise RuntimeError(f"CUDA shim: error {error} of a host function")


def _moved(values: Any, device: str) -> Any:
    """Return arguments of an operation with the tensors of the GPU on `device`: cpu or meta."""
    move = on_host if device == "cpu" else lambda each: each.to("meta")
    values = tree_map_only(torch.Tensor, move, values)
    return tree_map_only(torch.device, lambda _: torch.device(device), values)


def _implement(name: str) -> None:
    packet, _, overload = name.partition(".")
    operation = getattr(getattr(torch.ops.aten, packet), overload or "default")

    def call(*args: Any, **kwargs: Any) -> torch.Tensor:
        given, named = _moved(args, "cpu"), _moved(kwargs, "cpu")
        if operation._schema.is_mutable:
            enqueue(lambda: operation(*given, **named))
            changed: torch.Tensor = kwargs.get("out", args[0])
            return changed
        shape = operation(*_moved(args, "meta"), **_moved(kwargs, "meta"))
        made = torch.empty_strided(shape.shape, shape.stride(), dtype=shape.dtype, device="cuda")
        target = on_host(made)
        enqueue(lambda: target.copy_(operation(*given, **named)))
        return made

    _library.impl(name, call, "CUDA", allow_override=True)


def implement() -> None:
    """Replace torch's kernels. `import torch` calls this at its end (build.py)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of what is replaced
        for name in OPERATIONS:
            _implement(name)
