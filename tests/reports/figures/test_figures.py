"""All figures of a summary: by name, valid, titled, with nothing in them that plotly would read as markup; as files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import plotly.io
import pytest

from perfscope.errors import PerfscopeError
from perfscope.reports.figures import figures
from perfscope.reports.figures.colours import LIGHT, SERIES, dark_of_light
from perfscope.results.categories import BY_ID, CATEGORIES
from perfscope.results.summary import Summary
from tests.reports.examples import EXAMPLES, gpu, large, nothing, straggler


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_figure_is_valid_titled_and_finite(name: str) -> None:
    for figure in EXAMPLES[name]().figures.values():
        go.Figure(figure.to_dict())  # raises for what plotly does not know
        assert figure.layout.title.text
        json.dumps(figure.to_plotly_json(), allow_nan=False)


def test_a_figure_is_an_attribute_and_an_item() -> None:
    made = gpu().figures
    assert made.time_breakdown is made["time_breakdown"]
    assert "timeline" in made
    assert "time_breakdown" in dir(made)
    assert len(repr(made)) < 500
    with pytest.raises(AttributeError, match="no figure 'pie'; there are time_breakdown, "):
        _ = made.pie
    with pytest.raises(KeyError, match="pie"):
        made["pie"]


def test_figures_are_made_once_and_without_a_rank_there_are_none() -> None:
    summary = gpu()
    assert summary.figures is summary.figures
    assert "time_breakdown" not in nothing().figures


def test_the_bars_are_the_time_breakdown() -> None:
    summary = gpu()
    made = summary.figures.time_breakdown
    labels = {trace.name: dict(zip(trace.y, trace.x, strict=True)) for trace in made.data}
    for row in summary.time_breakdown:
        for name in CATEGORIES:
            drawn = labels.get(BY_ID[name].label, {}).get(str(row.rank), 0.0)
            assert drawn == pytest.approx(row.categories()[name] / 1000, rel=1e-3)  # ms
    order = made.layout.meta["orders"]["compute"]["yaxis"]["categoryarray"]
    compute = {str(row.rank): row.compute_us for row in summary.time_breakdown}
    assert [compute[rank] for rank in order] == sorted(compute.values(), reverse=True)


def test_many_ranks_are_a_heat_map_of_shares() -> None:
    summary = large(65)
    shares = {}
    for trace in summary.figures.time_breakdown.data:
        assert trace.type == "heatmap"
        for label, values in zip(trace.y, trace.z, strict=True):
            shares.setdefault(label, values)
            if values[0] is not None:
                shares[label] = values
    compute = [100 * row.share("compute") for row in summary.time_breakdown]
    assert shares["Compute"] == pytest.approx(compute, rel=1e-3)


@pytest.mark.parametrize("make", [gpu, straggler, large])
def test_every_colour_has_one_in_the_dark(make: Any) -> None:
    made: Summary = make()
    text = json.dumps([figure.to_plotly_json() for figure in made.figures.values()])
    used = {part for part in text.split('"') if part.startswith("#") and len(part) == 7}
    assert used <= {*LIGHT.values(), *SERIES}
    assert used - {*SERIES} <= set(dark_of_light())


def test_without_kaleido_images_are_refused_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(PerfscopeError, match="pip install 'kaleido>=1'"):
        gpu().figures.write_images(tmp_path)


def test_each_figure_is_a_png_and_an_svg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Kaleido is stood in for: it needs a browser of its own."""
    asked: dict[str, Any] = {}

    def written(made: list[go.Figure], files: list[Path], **options: Any) -> None:
        asked.update(zip(files, made, strict=True), **options)

    monkeypatch.setattr(figures, "check_images", lambda: None)
    monkeypatch.setattr(plotly.io, "write_images", written)
    summary = gpu()
    summary.figures.write_images(tmp_path / "new")
    assert asked[tmp_path / "new" / "time_breakdown.png"] is summary.figures.time_breakdown
    assert {path.name for path in asked if isinstance(path, Path)} == {
        f"{name}.{kind}" for name in summary.figures for kind in ("png", "svg")
    }

    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("Kaleido requires Google Chrome")

    monkeypatch.setattr(plotly.io, "write_images", fails)
    with pytest.raises(PerfscopeError, match="Kaleido requires Google Chrome"):
        summary.figures.write_images(tmp_path)
