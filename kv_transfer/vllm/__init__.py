"""All use of vLLM by the KV plane. Tested with vLLM 0.32.0 and 0.33.0 (CPU).

docs/vllm.md lists every patch and private name.
"""
