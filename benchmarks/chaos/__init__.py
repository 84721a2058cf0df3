"""``pdserve chaos``: faults against a real service, and what they cost its clients."""
