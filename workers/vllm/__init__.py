"""The engine on vLLM: all use of vLLM by this package. Tested with vLLM 0.32.0.

docs/vllm.md lists every patch and private name.
"""
