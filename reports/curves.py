"""What-if curves: predicted step time over the values of a setting, with the value of now marked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from perfscope.reports.format import duration, share, significant, unit_for
from perfscope.summary import Summary
from perfscope.summary_tables import CurvePoint, CurveRow


@dataclass(frozen=True)
class Curve:
    """One curve in words."""

    setting: str
    reading: str


def curves_chart(summary: Summary) -> list[dict[str, Any]]:
    """The values of every curve, in one unit of time each."""
    return [_curve(curve) for curve in summary.curves]


def curves(summary: Summary) -> tuple[Curve, ...]:
    """What each curve shows here, in the order of ``curves_chart``."""
    return tuple(Curve(curve.setting, _reading(curve)) for curve in summary.curves)


def _curve(curve: CurveRow) -> dict[str, Any]:
    unit = unit_for(max(point.high_us for point in curve.points))

    def scaled(values: list[float]) -> list[float]:
        return [float(f"{value / unit.size:.5g}") for value in values]

    return {
        "setting": curve.setting,
        "of": curve.unit,
        "unit": unit.name,
        "values": [point.value for point in curve.points],
        "low": scaled([point.low_us for point in curve.points]),
        "mid": scaled([point.mid_us for point in curve.points]),
        "high": scaled([point.high_us for point in curve.points]),
        "current": curve.current,
        "best": curve.best,
    }


def _reading(curve: CurveRow) -> str:
    best = _at(curve, curve.best)
    if curve.current is None and best is not None and best.mid_us > min(point.mid_us for point in curve.points):
        return (
            f"Here no value saves 2% over {_value(curve, curve.best)}, with {duration(best.mid_us)} a step; what is "
            "set now was not recorded."
        )
    text = f"Here {_value(curve, curve.best)} is best"
    if best is not None:
        text += f", with {duration(best.mid_us)} a step"
    now = _at(curve, curve.current) if curve.current is not None else None
    if curve.current is None:
        return f"{text}; what is set now was not recorded."
    if curve.current == curve.best:
        return f"Here {_value(curve, curve.best)}, as set now, is as good as any."
    text += f"; set now: {_value(curve, curve.current)}"
    if now is not None and best is not None and best.mid_us > 0:
        saved = now.mid_us / best.mid_us - 1
        text += f" with {duration(now.mid_us)}, so that the best does {share(saved)} more steps a second"
    return f"{text}."


def _at(curve: CurveRow, value: float) -> CurvePoint | None:
    return next((point for point in curve.points if point.value == value), None)


def _value(curve: CurveRow, value: float) -> str:
    unit = curve.unit.removesuffix("s") if value == 1 and curve.unit.endswith("s") else curve.unit
    return f"{significant(value) if value != int(value) else f'{int(value):,}'} {unit}"
