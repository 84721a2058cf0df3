"""Parts of the step loop in workers/vllm/core.py."""
