"""Real reports in the site: the sample recordings, analyzed as the site is built."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import perfscope
from perfscope.reports.compare import page as comparison_page

SAMPLES: Final = {
    "starved": (
        "Data loading",
        "Two ranks. The data set sleeps 120 ms for every batch. The page says so, and predicts what workers bring.",
    ),
    "slow_rank": (
        "A straggler",
        "Three ranks. Rank 1 sleeps 80 ms in every forward. The page names it, and what waiting for it costs.",
    ),
    "healthy": ("Nothing planted", "Two ranks, nothing planted. The page says what is left, and how sure that is."),
}
"""Folder of sample_traces -> (heading, what is planted)."""

COMPARISON: Final = "comparison.html"

ABOUT: Final = """Reports of real trainings on a machine with two cores and no GPU, made as this site was built from the
recordings in [sample_traces](https://github.com/perfscope/perfscope/tree/main/sample_traces). Each is one file: open it
in a tab of its own. [Reading the report](report.md) explains what is on it."""


def reports(samples: Path, into: Path) -> list[Path]:
    """Analyze the samples, and compare two of them; the pages written."""
    pages = []
    summaries = {name: perfscope.analyze(samples / name) for name in SAMPLES}
    for name, summary in summaries.items():
        pages.append(into / f"{name}.html")
        summary.write_html(pages[-1])
    pages.append(into / COMPARISON)
    comparison_page.write(perfscope.compare(summaries["starved"], summaries["healthy"]), pages[-1])
    return pages


def page() -> str:
    """The gallery in Markdown."""
    parts = ["# Gallery", ABOUT]
    shown = [(heading, text, f"{name}.html") for name, (heading, text) in SAMPLES.items()]
    shown.append(
        (
            "A comparison",
            "From the starved recording to the healthy one: what changed, and what of it is significant.",
            COMPARISON,
        )
    )
    for heading, text, file in shown:
        parts.append(f"## {heading}")
        parts.append(f"{text} [Open the page](gallery/{file}){{ target=_blank }}")
        parts.append(
            f'<iframe src="{file}" title="{heading}" loading="lazy" '
            'style="width: 100%; height: 36rem; border: 1px solid var(--md-default-fg-color--lighter)"></iframe>'
        )
    return "\n\n".join(parts) + "\n"
