"""A number as an option's value, refused in words."""

from __future__ import annotations

import math
from typing import Any

import click


class Number(click.FloatRange):
    """A finite number within bounds; ``FloatRange`` would say what type it is not, and takes ``nan``."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number. Raises BadParameter saying which numbers are meant."""
        try:
            number = super().convert(value, param, ctx)
        except click.BadParameter:
            number = math.nan
        if not math.isfinite(number):
            above = f"above {self.min:g}" if self.min_open else f"of at least {self.min:g}"
            meant = above if self.max is None else f"from {self.min:g} to {self.max:g}"
            self.fail(f"must be a number {meant}, not {value!r}", param, ctx)
        return number
