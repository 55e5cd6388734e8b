"""The page as HTML: complete, escaped, self-contained, and never showing what it does not know as a number."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import plotly
import pytest

from perfscope.analyzers.compare.compare import is_summary
from perfscope.errors import UnusableInput
from perfscope.reports import html as html_files
from perfscope.reports.figures.layout import plain, shortened
from perfscope.reports.kernel_names import short_name
from perfscope.reports.page import page
from perfscope.reports.page.definitions import DEFINITIONS
from perfscope.results.file import load_summary
from perfscope.results.notes import Note
from perfscope.results.rows import Failure, Verdict
from perfscope.results.summary import Summary
from tests.reports import pictures
from tests.reports.examples import EXAMPLES, broken, gpu, healthy, large, nothing, starved, straggler
from tests.reports.packed import unpacked

VOID = {"meta", "link", "br", "wbr", "img", "input", "hr"}
HOSTILE = {
    "script": "</script><script>alert(1)</script>",
    "quotes": """"><b onmouseover='x'>"' """,
    "comment": "<!-- <script> ]]> {{ 7*7 }} {% raw %}",
    "right-to-left": "مرتبة \u202eabc\u202c كبيرة",
    "long": "kernel_" + "x" * 10_000,
    "surrogate": "half \ud800 pair",
    "none": "&lt;not markup&gt; &amp;",
}


class Page(HTMLParser):
    """A parsed page: its texts, its elements with their attributes, its tables by id."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.scripts: list[str] = []
        self.values: dict[str, list[float]] = {}
        self._tables: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == [], "elements left open"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.elements.append((tag, found))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self._tables.append(found.get("id") or "")
        if tag in {"td", "th"} and found.get("data-v"):
            self.values.setdefault(self._tables[-1], []).append(float(found["data-v"] or ""))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)
        elif self.open and self.open[-1] != "style":
            self.texts.append(data)

    @property
    def text(self) -> str:
        """All the text a reader can come to see."""
        return " ".join(" ".join(self.texts).split())

    @property
    def ids(self) -> list[str]:
        """Every id, in order."""
        return [attrs["id"] or "" for _, attrs in self.elements if "id" in attrs]


def parsed(summary: Summary) -> Page:
    """The page of ``summary``, parsed."""
    return Page(page.render(summary))


@dataclass(frozen=True)
class Example:
    """An example and its page."""

    summary: Summary
    html: str
    page: Page


@pytest.fixture(scope="module", params=EXAMPLES)
def example(request: pytest.FixtureRequest) -> Example:
    """Each of the examples, rendered once for all tests."""
    summary: Summary = EXAMPLES[request.param]()
    html = page.render(summary)
    return Example(summary, html, Page(html))


def test_every_number_of_the_time_breakdown_is_in_its_table(example: Example) -> None:
    values = example.page.values.get("time-breakdown", [])
    rows = [
        (row.rank, row.step_time_us, *row.categories().values(), row.comm_us, row.hidden_comm_us)
        for row in example.summary.time_breakdown
    ]
    # All but what is 0 on every rank.
    columns = [column for index, column in enumerate(zip(*rows, strict=True)) if index == 0 or any(column)]
    assert values == [value for row in zip(*columns, strict=True) for value in row]


def test_what_is_absent_never_reads_as_a_value(example: Example) -> None:
    found = example.page
    unwanted = {"None", "nan", "NaN", "inf", "null", "undefined"}
    assert not unwanted & set(re.findall(r"\w+", found.text))
    assert not unwanted & {value for _, attrs in found.elements for value in attrs.values() if value is not None}


def test_the_headline_is_the_only_first_heading(example: Example) -> None:
    found = example.page
    assert [tag for tag, _ in found.elements].count("h1") == 1
    assert example.summary.verdict.headline in found.text.replace("\xa0", " ")


def test_headings_go_down_one_level_at_a_time(example: Example) -> None:
    levels = [int(tag[1]) for tag, _ in example.page.elements if re.fullmatch(r"h[1-6]", tag)]
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))


def test_ids_are_unique_and_every_reference_leads_somewhere(example: Example) -> None:
    found = example.page
    assert len(found.ids) == len(set(found.ids))
    targets = set(found.ids)
    for _, attrs in found.elements:
        for name in ("aria-describedby", "aria-labelledby", "data-copies"):
            if attrs.get(name):
                assert attrs[name] in targets
        if (attrs.get("href") or "").startswith("#"):
            assert (attrs["href"] or "")[1:] in targets
        if attrs.get("data-def"):
            assert attrs["data-def"] in DEFINITIONS


def test_every_heading_of_a_table_has_its_scope(example: Example) -> None:
    headings = [attrs for tag, attrs in example.page.elements if tag == "th"]
    assert all(attrs.get("scope") in {"col", "row"} for attrs in headings)


def test_nothing_is_loaded_and_only_named_scripts_may_run(example: Example) -> None:
    html, found = example.html, example.page
    for tag, attrs in found.elements:
        assert tag not in {"link", "img", "iframe", "object", "embed", "base"}
        assert "src" not in attrs
        assert not any(name.startswith("on") for name in attrs)
        assert not re.match(r"(?i)\s*(https?:|//|javascript:)", attrs.get("href") or "")
    style = html[html.index("<style>") : html.index("</style>")]
    assert "url(" not in style
    assert "@import" not in style
    policy = next(attrs["content"] or "" for _, attrs in found.elements if attrs.get("http-equiv"))
    assert "default-src 'none'" in policy
    assert "http" not in policy
    script_sources = re.search(r"script-src ([^;]*)", policy)
    assert script_sources
    # All but the packed figures, plotly and the summary, which are text; what they become is a blob's.
    assert len(script_sources[1].split()) == len(found.scripts) - 3 + len(["blob:"])
    assert "unsafe" not in script_sources[1]


def test_plotly_is_there_once_and_the_page_stays_small(example: Example) -> None:
    html = example.html
    assert unpacked(html, "plotly") == (Path(plotly.__file__).parent / "package_data" / "plotly.min.js").read_bytes()
    assert html.count('id="plotly"') == 1
    size = len(html.encode())
    assert size < (4e6 if len(example.summary.job.ranks) > 8 else 2.3e6)


def test_plotly_is_packed_once_for_all_reports(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where the package may not be written to, the cache keeps it."""
    monkeypatch.setenv("PERFSCOPE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(html_files, "__file__", str(tmp_path / "no folder" / "html.py"))
    page._plotly.cache_clear()
    first = page._plotly()
    page._plotly.cache_clear()
    monkeypatch.setattr(page.file, "packed", lambda content: "packed again")
    assert page._plotly() == first
    for entry in tmp_path.rglob("*.gz.b64"):
        entry.write_bytes(b"\xff")  # damaged: not ASCII
    page._plotly.cache_clear()
    assert page._plotly() == "packed again"
    page._plotly.cache_clear()


@pytest.mark.parametrize("hostile", HOSTILE.values(), ids=HOSTILE)
def test_names_from_a_recording_are_text(hostile: str, tmp_path: Path) -> None:
    summary = _everywhere(hostile)
    page.write(summary, tmp_path / "report.html")
    written = (tmp_path / "report.html").read_text(encoding="utf-8")
    clean = Page(page.render(_everywhere("plain")))
    found = Page(written)
    shown = hostile.encode("utf-8", "replace").decode()
    assert found.text.count(" ".join(shown.split())) >= 15
    # The structure is the same as with a harmless name, except that long names are folded.
    skeleton = [tag for tag, attrs in found.elements if tag not in {"details", "summary", "bdi", "span"}]
    assert skeleton == [tag for tag, attrs in clean.elements if tag not in {"details", "summary", "bdi", "span"}]
    assert _figures(written)["time_breakdown"]["data"][0]["customdata"][0][1].endswith(f" on {shortened(hostile)}")


def _everywhere(name: str) -> Summary:
    """A job in which every text that can come from outside is ``name``."""
    summary = straggler()
    action = dataclasses.replace(summary.findings[0].action, setting=name, old=name, new=name, how=name)
    evidence = tuple(dataclasses.replace(row, what=name) for row in summary.findings[0].evidence)
    finding = dataclasses.replace(summary.findings[0], title=name, action=action, evidence=evidence)
    job = dataclasses.replace(
        summary.job,
        failures=(Failure(rank=3, path=name, error=name),),
        strategy=name,
        backend=name,
        devices=(name,),
        hosts=(name,),
        command=(name,),
        started_at=name,
        model={"name": name, "parameters": 3, "parameter_bytes": 4, "dtypes": [name]},
        settings={name: {name: name}},
        versions={"torch": name, name: name},
        steps_from=name,
    )
    return dataclasses.replace(
        summary,
        job=job,
        time_breakdown=tuple(
            dataclasses.replace(row, host=name + ("" if row.rank == 0 else str(row.rank)), named_host_us={name: 1e4})
            for row in summary.time_breakdown
        ),
        collectives=tuple(dataclasses.replace(row, group=name, dtype=name, kind=name) for row in summary.collectives),
        cost_model=tuple(dataclasses.replace(row, group=name, kind=name) for row in summary.cost_model),
        stragglers=tuple(dataclasses.replace(row, host=name, cause=name) for row in summary.stragglers),
        findings=(finding,),
        verdict=Verdict(headline=name, healthy=False, first_action=name),
        notes=(Note(about=name, kind=name, text=name),),
        source=name,
    )


def _figures(html: str) -> dict[str, Any]:
    """The figures, as the page's script reads them."""
    result: dict[str, Any] = json.loads(unpacked(html, "figures"))["figures"]
    return result


def test_the_page_holds_the_summarys_figures() -> None:
    summary = gpu()
    shown = _figures(page.render(summary))
    assert list(shown) == list(summary.figures)
    theirs = {name: json.loads(figure.to_json()) for name, figure in summary.figures.items()}
    for figure in theirs.values():
        del figure["layout"]["template"]  # an empty one, without which plotly takes its own
    assert shown == theirs  # plotly's objects refuse what plotly does not know


def test_without_steps_nothing_is_said_of_a_step() -> None:
    """Not in a sentence, a table or a chart; the glossary defines steps all the same."""
    summary = gpu()
    job = dataclasses.replace(summary.job, steps=(), step_time_us_per_step=())
    html = page.render(dataclasses.replace(summary, job=job, history=None, findings=()))
    shown = Page(html[: html.index('<section id="definitions"')] + "</main></body></html>").text
    assert "of the recording" in shown
    assert not re.search(r"of (the|its|each) step\b|per step\b|One step\b", shown)
    assert "per step" not in json.dumps(_figures(html))


def test_one_rank_has_no_communication_and_nothing_to_sort() -> None:
    summary = healthy()
    one = dataclasses.replace(summary.time_breakdown[0], comm_us=0.0, hidden_comm_us=0.0, exposed_comm_wait_us=0.0)
    one = dataclasses.replace(one, exposed_comm_transfer_us=0.0)
    job = dataclasses.replace(summary.job, world_size=1, ranks=(0,))
    html = page.render(
        dataclasses.replace(summary, job=job, time_breakdown=(one,), collectives=(), cost_model=(), stragglers=())
    )
    assert 'id="communication"' not in html
    assert 'id="breakdown-sort"' not in html
    assert "Exposed communication" not in html[: html.index('id="definitions"')]


def test_many_ranks_become_a_heat_map_with_a_folded_table() -> None:
    summary = large(65)
    html = page.render(summary)
    assert _figures(html)["time_breakdown"]["data"][0]["type"] == "heatmap"
    assert '<details class="numbers">' in html
    assert '<details open class="numbers">' in page.render(large(16))


def test_a_job_that_waits_for_data_is_described_in_words() -> None:
    text = parsed(starved()).text.replace("\xa0", " ")
    assert "Data loading limits the job" in text
    assert "at most 1.72x faster" in text
    assert "At most 1.72x faster: a bound, not a prediction." in text
    assert "Compute takes 54% of all ranks' time; the largest other category is data loading (41%)." in text
    assert "DataLoader(dataset, num_workers=1, persistent_workers=True)" in text


def test_the_straggler_is_named_where_the_others_wait() -> None:
    text = parsed(straggler()).text.replace("\xa0", " ")
    assert "They wait for rank 2 (slower compute)." in text
    assert "the others wait for rank 2." in text
    assert "Rank 2 costs most: at its peers' pace, the replayed step is 60.7 ms shorter" in text
    assert "517" not in text


def test_a_healthy_job_says_so_plainly() -> None:
    html = page.render(healthy())
    assert '<section id="verdict" class="healthy"' in html
    assert "Nothing worth changing was found." in Page(html).text
    assert "No rank is a straggler" in Page(html).text


def test_a_headline_of_several_sentences_is_shown_whole() -> None:
    """Only what is far longer is folded, behind a word; the window's title ends with a word, too."""
    sentences = "Another 40% of the step, more than this change saves, is exposed transfer. " * 9
    verdict = dataclasses.replace(healthy().verdict, headline=sentences.strip())
    assert f"<title>{healthy().verdict.headline} – PerfScope</title>" in page.render(healthy())
    html = page.render(dataclasses.replace(healthy(), verdict=verdict))
    assert f'<h1 id="headline"><bdi>{sentences.strip()}</bdi></h1>' in html
    assert "is exposed transfer. Another 40% of the step, more than this – PerfScope</title>" in html
    longer = dataclasses.replace(verdict, headline=sentences * 3)
    html = page.render(dataclasses.replace(healthy(), verdict=longer))
    assert "Another 40% of the step, more than this change saves, is exposed transfer. Another…</bdi></summary>" in html


def test_mfu_is_a_lower_bound_where_shapes_are_missing_and_a_reason_where_there_is_none() -> None:
    assert "≥ 41%" in parsed(gpu()).text
    assert "No peak is known for cpu." in parsed(healthy()).text


def test_gaps_are_stated() -> None:
    text = parsed(broken()).text.replace("\xa0", " ")
    assert "2 files could not be analyzed" in text
    assert "the gzip stream ends early after 1.2 MB" in text
    assert "Not recorded: 1 of 4 ranks (3)." in text
    assert "killed by signal 9" in text
    assert "No steps were found (nothing: no ProfilerStep annotation and no optimizer step)" in text
    assert "The profiler overhead is not known" in text
    assert "Only one participant is in the recording" in text
    assert "≥ 90.0" in text
    assert "≤ 160.0" in text


def test_without_a_rank_the_page_still_says_what_went_wrong() -> None:
    text = parsed(nothing()).text
    assert "No rank could be analyzed" in text
    assert "recording/trace.json" in text


def test_numbers_that_are_none_do_not_break_the_page() -> None:
    summary = gpu()
    hostile = math.nan
    utilisation = dataclasses.replace(summary.utilisation, mfu=hostile, peak_tflops=math.inf, why_absent=None)
    findings = (dataclasses.replace(summary.findings[0], ceiling=math.inf),)
    collectives = tuple(
        dataclasses.replace(row, busbw_gbps=hostile, transfer_us=hostile) for row in summary.collectives
    )
    summary = dataclasses.replace(summary, utilisation=utilisation, findings=findings, collectives=collectives)
    found = parsed(summary)
    assert not {"nan", "inf"} & set(re.findall(r"\w+", found.text))
    assert "no useful bound" in found.text


def test_a_page_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "report.html"
    target.write_text("before", encoding="utf-8")

    def half_way(*_: object, **__: object) -> Iterator[str]:
        yield "<!DOCTYPE html>"
        raise RuntimeError("half way")

    monkeypatch.setattr(page, "assembled", half_way)
    with pytest.raises(RuntimeError, match="half way"):
        page.write(healthy(), target)
    assert target.read_text(encoding="utf-8") == "before"
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


@pytest.mark.parametrize("hostile", ["</script><script>alert(1)</script>", "k" * 10_000, "\u202eabc", "half \ud800"])
def test_names_in_pictures_are_data(hostile: str) -> None:
    summary = dataclasses.replace(
        gpu(), lanes=pictures.lanes((0, 1), kernel=hostile, group=hostile), history=pictures.history(hostile)
    )
    html = page.render(summary)
    figures = _figures(html)
    texts = [text for trace in figures["timeline"]["data"] for text in trace.get("customdata", ())]
    assert any(f"<b>{shortened(short_name(hostile), 90)}</b>" in text for text in texts)
    assert figures["history"]["data"][2]["customdata"] == [f"{plain(hostile)}, rank 0"]
    assert html.count("<script>alert(1)") == 0


@pytest.mark.scale
def test_many_ranks_stay_small() -> None:
    assert len(page.render(dataclasses.replace(large(), lanes=pictures.lanes(range(8)))).encode()) < 12e6


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.scale if name == "large" else ()) for name in EXAMPLES]
)
def test_a_page_can_be_read_back_as_the_summary_it_shows(name: str, tmp_path: Path) -> None:
    summary = EXAMPLES[name]()
    summary.write_html(tmp_path / "report.html")
    assert load_summary(tmp_path / "report.html") == Summary.from_dict(json.loads(json.dumps(summary.to_dict())))
    assert is_summary(tmp_path / "report.html")


def test_another_page_is_no_summary(tmp_path: Path) -> None:
    (tmp_path / "other.html").write_text("<!DOCTYPE html><p>perfscope.summary/1", encoding="utf-8")
    with pytest.raises(UnusableInput, match="a page that holds no summary"):
        load_summary(tmp_path / "other.html")
