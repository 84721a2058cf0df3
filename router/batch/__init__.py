"""Files and batches: OpenAI's Batch API on SQLite, shared by the routers of one host."""
