"""KV over NCCL."""
