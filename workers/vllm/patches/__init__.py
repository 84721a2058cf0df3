"""Patches of vLLM, one a file. docs/vllm.md has the list."""
