"""OpenAI's Files and Batch API, on the store that routers share."""
