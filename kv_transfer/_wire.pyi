from kv_transfer.messages import Bytes

def send_pages(
    fd: int,
    head: Bytes,
    flags: int,
    address: int,
    layer_stride: int,
    block_stride: int,
    ids: list[int],
    num_layers: int,
    page_bytes: int,
    /,
) -> int: ...
def receive_pages(
    fd: int,
    ahead: Bytes,
    address: int,
    layer_stride: int,
    block_stride: int,
    ids: list[int],
    num_layers: int,
    page_bytes: int,
    /,
) -> int: ...
