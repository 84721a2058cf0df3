"""GPU memory, streams and events. Nothing here but `region` is imported unless a transport that
needs it is configured.

    base     what transports ask of a device, as interfaces: fakes fit under them
    runtime  the few calls of the CUDA runtime that we make, by ctypes
    cuda     a GPU: the runtime's memory, streams and events, and the gather kernels
    region   a KV cache in GPU memory, as vLLM lays it out
    slots    a staging ring's slots, and which of them are unsafe
    waiting  for a copy, by asking
    staging  a ring of them with its memory, shared by the links of a process
"""
