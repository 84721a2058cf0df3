"""KV caches in memory: geometry, copies, digests."""
