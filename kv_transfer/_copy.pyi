def copy_pages(
    to: int,
    to_layer_stride: int,
    to_block_stride: int,
    to_ids: list[int],
    source: int,
    source_layer_stride: int,
    source_block_stride: int,
    source_ids: list[int],
    num_layers: int,
    page_bytes: int,
    /,
) -> None: ...
