"""Which worker prefills and which decodes, while they run."""
