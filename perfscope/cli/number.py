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
            self.fail(f"must be a number{_within(self)}, not {value!r}", param, ctx)
        return number


class Whole(click.IntRange):
    """A whole number within bounds."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number. Raises BadParameter saying which numbers are meant."""
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter:
            self.fail(f"must be a whole number{_within(self)}, not {value!r}", param, ctx)


def _within(bounds: click.IntRange | click.FloatRange) -> str:
    if bounds.min is None:
        return ""
    if bounds.max is not None:
        return f" from {bounds.min:g} to {bounds.max:g}"
    return f" {'above' if bounds.min_open else 'of at least'} {bounds.min:g}"
