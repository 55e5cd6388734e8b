"""All figures of one summary by name: ``summary.figures.time_breakdown``; and as image files."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from perfscope.errors import PerfscopeError
from perfscope.reports.figures.allocations import allocations_figure
from perfscope.reports.figures.breakdown import breakdown_figure
from perfscope.reports.figures.communication import arrivals_figure, bandwidth_figure, overlap_figure
from perfscope.reports.figures.layout import Drawn
from perfscope.reports.figures.memory import memory_figure
from perfscope.reports.figures.pipeline import pipeline_figure
from perfscope.reports.figures.roles import roles_figure
from perfscope.reports.figures.run import curve_figure, curve_name, history_figure, steps_figure
from perfscope.reports.figures.step import path_figure, step_figure
from perfscope.reports.figures.system import system_figure
from perfscope.reports.figures.timeline import timeline_figure
from perfscope.results.summary import Summary
from perfscope.text import of_recording

if TYPE_CHECKING:
    import plotly.graph_objects as go

_MAKERS: Final[Mapping[str, Callable[[Summary], Drawn | None]]] = {
    "roles": roles_figure,
    "time_breakdown": breakdown_figure,
    "pipeline": pipeline_figure,
    "timeline": timeline_figure,
    "step_timeline": step_figure,
    "critical_path": path_figure,
    "steps": steps_figure,
    "history": history_figure,
    "memory": memory_figure,
    "allocations": allocations_figure,
    "system": system_figure,
    "overlap": overlap_figure,
    "last_arrivals": arrivals_figure,
    "bandwidth": bandwidth_figure,
}

_IMAGE_WIDTH: Final = 960


class Figures(Mapping[str, "go.Figure"]):
    """The figures of one summary, those that have something to show: by name, and as attributes."""

    def __init__(self, summary: Summary) -> None:
        drawn = {name: make(summary) for name, make in _MAKERS.items()}
        drawn |= {curve_name(curve): curve_figure(curve) for curve in summary.curves}
        worded = _of_recording if summary.is_one_window else lambda figure: figure
        self.drawn: Final = {name: worded(figure) for name, figure in drawn.items() if figure is not None}
        """The figures as plotly's JSON has them: what a page needs."""
        self._made: dict[str, go.Figure] = {}

    def __getitem__(self, name: str) -> go.Figure:
        if name not in self.drawn:
            raise KeyError(f"no figure {name!r}; there are {', '.join(self.drawn)}")
        if name not in self._made:
            import plotly.graph_objects as go

            self._made[name] = go.Figure(
                {**self.drawn[name], "layout": {"template": "none", **self.drawn[name]["layout"]}}
            )
        return self._made[name]

    def __getattr__(self, name: str) -> go.Figure:
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(error.args[0]) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self.drawn)

    def __len__(self) -> int:
        return len(self.drawn)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self.drawn]

    def __repr__(self) -> str:
        return f"<Figures: {', '.join(self.drawn) or 'none'}>"

    def write_images(self, folder: Path) -> None:
        """Write each figure as PNG and SVG, ``NAME.png`` and ``NAME.svg``; ``folder`` is made where it is not there.

        Raises PerfscopeError where kaleido, or the browser it needs, is missing, and where nothing can be written.
        """
        check_images()
        import plotly.io

        try:
            folder.mkdir(parents=True, exist_ok=True)
            figures = [figure for figure in self.values() for _ in ("png", "svg")]
            files = [folder / f"{name}.{kind}" for name in self for kind in ("png", "svg")]
            heights = [int(figure.layout.height) for figure in figures]
            plotly.io.write_images(figures, files, width=_IMAGE_WIDTH, height=heights, scale=2)
        except OSError as error:
            raise PerfscopeError(f"{folder}: cannot be written ({error.strerror or error})") from error
        except RuntimeError as error:  # plotly's, with what to install
            raise PerfscopeError(f"the figures cannot be drawn as images: {' '.join(str(error).split())}") from error


def _of_recording(figure: Drawn) -> Drawn:
    """The figure, in words that name no step."""
    worded: Drawn = json.loads(of_recording(json.dumps(figure, ensure_ascii=False)))
    return worded


def check_images() -> None:
    """Raise PerfscopeError where figures cannot be drawn as images because kaleido is not installed."""
    if importlib.util.find_spec("kaleido") is None:
        raise PerfscopeError("kaleido, which draws figures as images, is not installed: pip install 'kaleido>=1'")
