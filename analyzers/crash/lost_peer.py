"""Exceptions that a rank raises because of another one: its connection is closed, or its collective times out."""

from __future__ import annotations

import re
from typing import Final

from perfscope.recording.metadata import ErrorMetadata

_TYPES: Final = ("DistBackendError", "DistNetworkError", "DistStoreError", "DistError")
"""Of torch.distributed, which raises plain ones as well. Python's own are of files and servers."""

_COMMUNICATION: Final = re.compile(
    r"gloo/|\[Rank \d+\]|NCCL|ProcessGroup|TCPStore|[Cc]onnection (?:was )?(?:closed|reset|refused)|Broken pipe"
    r"|[Mm]onitored ?[Bb]arrier|[Ss]ocket [Tt]imeout"
)
"""In messages of communication."""

_TIMEOUT: Final = re.compile(r"tim(?:ed? ?|e-)out|failed to (?:pass|reach)", re.IGNORECASE)
"""In messages about waiting for too long: ``monitored_barrier`` names ranks that failed to pass or reach it."""


def is_of_communication(error: ErrorMetadata) -> bool:
    """Was it raised by communication, or because of such an exception?"""
    texts = (f"{error.type}: {error.message}", *error.causes)
    return any(
        text.startswith(_TYPES) or (text.startswith("RuntimeError") and _COMMUNICATION.search(text)) for text in texts
    )


def is_timeout(error: ErrorMetadata) -> bool:
    """Is an exception of communication about waiting for too long?"""
    return any(_TIMEOUT.search(text) for text in (error.message, *error.causes))
