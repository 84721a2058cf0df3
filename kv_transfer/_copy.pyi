def copy(
    source: int,
    source_layer_stride: int,
    source_block_stride: int,
    source_ids: list[int],
    target: int,
    target_layer_stride: int,
    target_block_stride: int,
    target_ids: list[int],
    num_layers: int,
    page_bytes: int,
    /,
) -> bytes: ...
def digest(
    source: int,
    layer_stride: int,
    block_stride: int,
    ids: list[int],
    num_layers: int,
    page_bytes: int,
    /,
) -> bytes: ...
