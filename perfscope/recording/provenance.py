"""Files in which inductor itself writes where its kernels come from, among a folder's files."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

_NAME: Final = re.compile(r"(?:^|[_-])kernel_information[\w.-]*\.json$|inductor_provenance_tracking_[\w.-]+\.json$")
"""``kernel_information.json`` of a package that AOTInductor made; what ``TORCH_COMPILE_DEBUG`` and tlparse write."""


def find(files: Iterable[Path]) -> tuple[Path, ...]:
    """Those of ``files`` that inductor wrote about its kernels, by name."""
    return tuple(path for path in files if _NAME.search(path.name))
