"""KV between processes of one host through memory that one GPU's owner lets another map. Nothing
here is imported unless it is configured.

    messages  what the two ends tell each other beside the bytes
    credits   which slots a source may fill, and when one may be filled by another: no I/O
    channels  the two ends of a link
"""
