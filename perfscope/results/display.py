"""How notebooks show a result: as HTML that ``perfscope.reports.notebook`` makes."""

from __future__ import annotations

import importlib
from typing import ClassVar


class Displayed:
    """A result that ends a notebook's cell."""

    _shown_by: ClassVar[str]
    """Function of ``perfscope.reports.notebook``, which is imported only when it is asked for."""

    def _repr_html_(self) -> str:
        html: str = getattr(importlib.import_module("perfscope.reports.notebook"), self._shown_by)(self)
        return html
