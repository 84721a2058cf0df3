from collections.abc import Callable, Iterable

class Lane:
    takes: bool
    waits: bool
    tokens: list[int] | None
    def __init__(
        self,
        fd: int,
        unsent: Callable[[], int],
        write: Callable[[bytes], None],
        before: bytes,
        after: bytes,
    ) -> None: ...

def pass_on(
    lanes: dict[int, Lane],
    stream_ids: Iterable[int],
    token_ids: Iterable[int],
    texts: Iterable[str],
    /,
) -> list[int]: ...
