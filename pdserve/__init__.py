"""pdserve: prefill/decode disaggregated serving of large language models on vLLM."""

__version__ = "0.1.0"
