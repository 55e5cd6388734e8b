"""The ten categories of a step: the one table of their ids, names and definitions."""

from __future__ import annotations

import enum
from typing import Final


class TimeCategory(enum.IntEnum):
    """One kind of time in a rank's step. A category's number is its precedence: the first one that applies counts.

    Exclusive and complete: every nanosecond of a step is in exactly one category, so the ten add up to the step.
    """

    id: str
    """In the JSON, there with ``_us``; also in the glossary and, behind ``--c-``, of its colour on the page."""
    label: str
    short: str
    """For a line in the terminal."""
    group: str
    definition: str

    def __new__(cls, number: int, *words: str) -> TimeCategory:
        """The category of a number (a look-up), or a line of the table below."""
        member = int.__new__(cls, number)
        member._value_ = number
        member.id, member.label, member.short, member.group, member.definition = words
        return member

    COMPUTE = (
        0, "compute", "Compute", "compute", "Compute",
        "At least one compute kernel is running: the union over streams, never a sum of durations.",
    )  # fmt: skip
    COMM_WAIT = (
        1, "exposed_comm_wait", "Waiting for late ranks", "wait", "Communication",
        ("A communication kernel is running, no compute kernel is, and the last participant has not arrived yet. The "
         "late rank causes it; the others pay."),
    )  # fmt: skip
    COMM_TRANSFER = (
        2, "exposed_comm_transfer", "Exposed transfer", "transfer", "Communication",
        "A communication kernel is running, no compute kernel is, and all participants have arrived.",
    )  # fmt: skip
    COPY = (
        3, "exposed_copy", "Exposed copy", "copy", "Copy",
        "Only a memory copy or memory set is running on the device.",
    )  # fmt: skip
    DATALOADER = (
        4, "idle_dataloader", "Data loading", "dataloader", "Idle",
        "Nothing on the device while the launching thread is inside the data loader's __next__.",
    )  # fmt: skip
    SYNC = (
        5, "idle_sync", "Host synchronization", "sync", "Idle",
        ("The host was blocked in a synchronize, .item() or a copy until the device was done, so its next launches "
         "came too late, until it was ahead of the device again. Without these calls the device would not be idle."),
    )  # fmt: skip
    LAUNCH = (
        6, "idle_launch", "Launch-bound time", "launch", "Idle",
        "Nothing on the device while the host was busy in framework operators and launches.",
    )  # fmt: skip
    HOST = (
        7, "idle_host", "Host time", "host", "Idle",
        ("Nothing on the device while the host ran Python or other code between operators, after a synchronization for "
         "0.5 ms and more; garbage collection, checkpoint writing and Python functions are named where visible."),
    )  # fmt: skip
    DEPENDENCY = (
        8, "idle_dependency", "Waiting for a dependency", "dependency", "Idle",
        ("The next kernel was already queued: what it waited for, on another stream or in a CUDA graph, had just "
         "ended. At most 20 µs at a time."),
    )  # fmt: skip
    UNKNOWN = (
        9, "idle_unknown", "Unknown idle time", "unknown", "Idle",
        ("Nothing on the device and no visible reason: the recording has too few host events, or lacks device work for "
         "which the next kernel was waiting, such as that of CUDA graphs."),
    )  # fmt: skip

    @property
    def phrase(self) -> str:
        """Its label inside a sentence."""
        return self.label[0].lower() + self.label[1:]


CATEGORIES: Final = tuple(category.id for category in TimeCategory)
"""The ids, in order of precedence."""

BY_ID: Final = {category.id: category for category in TimeCategory}

IDLE: Final = tuple(category.id for category in TimeCategory if category.group == "Idle")
"""The categories that together are the idle time."""

EXPOSED_COMMUNICATION: Final = tuple(category.id for category in TimeCategory if category.group == "Communication")
"""The categories that together are the exposed communication."""
