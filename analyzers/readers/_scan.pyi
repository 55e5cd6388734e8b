from collections.abc import Callable

_Result = tuple[
    int,  # consumed
    bool,  # the array ended
    int,  # events
    tuple[bytearray, ...],  # columns
    tuple[list[bytes], ...],  # new names, tracks, shapes, types, inputs
    list[bytes],  # events that are read in Python
    list[tuple[int, bytes]],  # row, arguments of a collective
    list[tuple[int, int]],  # row, number of a step
]

class Scanner:
    def __init__(
        self, category_of: Callable[[bytes], int], on_device: int, described: int, python: int, other: int, /
    ) -> None: ...
    def scan(self, data: bytearray, start: int, stop: int, last: bool, /) -> _Result | None: ...
    def undo(self) -> None: ...
