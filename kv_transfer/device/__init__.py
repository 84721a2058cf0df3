"""KV caches in GPU memory. Only this folder and transport/nccl_binding.py speak to CUDA."""
