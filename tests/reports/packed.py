"""What a page holds packed, unpacked as its script does."""

from __future__ import annotations

import base64
import gzip
import re
from typing import Final

_PACKED: Final = re.compile(r"H4sI[A-Za-z0-9+/]{60,}={0,2}")
"""Gzip in base64: the first three bytes of gzip are always these letters."""


def unpacked(html: str, name: str) -> bytes:
    """``name`` is ``figures`` (JSON) or ``plotly``."""
    match = re.search(rf'<script type="text/plain" id="{name}">([^<]*)</script>', html)
    assert match
    return gzip.decompress(base64.b64decode(match[1]))


def readable(html: str) -> str:
    """The page with what it holds packed in the clear: letters of base64 spell any short name sooner or later."""
    return _PACKED.sub(lambda packed: gzip.decompress(base64.b64decode(packed[0])).decode(), html)
