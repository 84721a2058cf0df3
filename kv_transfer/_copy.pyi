DIGESTS: bool

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
def copy_digested(
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
) -> int: ...
def digest_pages(
    source: int,
    layer_stride: int,
    block_stride: int,
    ids: list[int],
    num_layers: int,
    page_bytes: int,
    /,
) -> int: ...
def load_word(address: int, /) -> int: ...
def store_word(address: int, value: int, /) -> None: ...
