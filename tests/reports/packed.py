"""What a page holds packed, unpacked as its script does."""

from __future__ import annotations

import base64
import gzip
import re


def unpacked(html: str, name: str) -> bytes:
    """``name`` is ``figures`` (JSON) or ``plotly``."""
    match = re.search(rf'<script type="text/plain" id="{name}">([^<]*)</script>', html)
    assert match
    return gzip.decompress(base64.b64decode(match[1]))
