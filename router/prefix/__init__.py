"""Which workers hold the KV of which prompts: an index fed by the workers themselves."""
