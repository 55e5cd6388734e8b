"""Terminal, page, Markdown and exit code of a comparison agree: every pair and some triples of generated jobs."""

from __future__ import annotations

import html
import itertools
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from perfscope.analyzers.compare.compare import compare
from perfscope.cli.main import main
from perfscope.reports.compare import page, words
from perfscope.reports.markdown import of_comparison
from perfscope.results.comparison import Comparison
from perfscope.results.summary import Summary
from tests.analyzers.measured import advised
from tests.generator import JobSpec, LoaderSpec, ModelSpec, SlowCompute, simulate
from tests.reports.examples import healthy

SPEC = JobSpec(ranks=2, steps=6, model=ModelSpec(layers=3, tokens=2048), end_sync=True, noise=0.02)
JOBS = {
    "plain": SPEC,
    "again": replace(SPEC, seed=1),
    "straggler": replace(SPEC, causes=(SlowCompute(ranks=(1,), factor=1.5),)),
    "little": replace(SPEC, causes=(SlowCompute(ranks=(1,), factor=1.03),), seed=2),
    "noisy": replace(SPEC, noise=0.3, seed=3),
    "short": replace(SPEC, steps=1),
    "four ranks": replace(SPEC, ranks=4),
    "half the batch": replace(SPEC, model=ModelSpec(layers=3, tokens=1024)),
    "loading": replace(SPEC, loader=LoaderSpec(load_ns=4_000_000)),
}


@pytest.fixture(scope="module")
def summaries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Summary]:
    folder = tmp_path_factory.mktemp("jobs")
    for name, spec in JOBS.items():
        simulate(spec).write(folder / name)
    return {name: advised(folder / name) for name in JOBS}


def check(comparison: Comparison, said: str, exit_code: int) -> None:
    """Raise where something says the opposite of something else."""
    text, verdicts = " ".join(said.split()), [difference.step.verdict for difference in comparison.differences]
    shown = " ".join(html.unescape(re.sub(r"<[^>]*>", " ", page.render(comparison))).split())
    shown = shown.replace("\N{WORD JOINER}", "").replace("\xa0", " ")
    markdown = of_comparison(comparison)
    for difference in comparison.differences:
        step, headline = difference.step, words.headline(comparison, difference)
        assert " ".join(headline.split()) in text
        assert headline in shown or words.title(comparison) in shown
        pace = re.search(r" is \S+ (faster|slower): ", headline)
        assert (pace[1] if pace else None) == (step.verdict if step.verdict in ("faster", "slower") else None)
        if pace:
            assert (step.delta_us < 0) is (pace[1] == "faster")
        by_name = {row.name: row.delta_us for row in difference.categories}
        assert all(by_name[name] * step.delta_us > 0 for name in difference.causes)
        metrics = {metric.name: metric for metric in difference.metrics}
        if "step_time" in metrics and step.verdict != "unknown":
            assert metrics["step_time"].significant is (step.verdict != "same")
            assert metrics["step_time"].delta == pytest.approx(step.delta_us)
    title, tone = words.title(comparison), words.tone(comparison)
    assert title in text
    assert title in shown
    assert exit_code == (3 if "slower" in verdicts else 0)
    assert tone != "faster" or "slower" not in verdicts
    assert tone != "slower" or "slower" in verdicts or comparison.scaling is not None
    if len(verdicts) > 1 and comparison.scaling is None:
        assert ("significantly slower" in title) is ("slower" in verdicts)
        assert ("the fastest" in title) is ("faster" in verdicts)
    assert markdown.count("🔴") == verdicts.count("slower")
    assert markdown.count("🟢") == verdicts.count("faster")


@pytest.mark.scale
def test_every_pair_and_triple(summaries: dict[str, Summary], tmp_path: Path) -> None:
    for name, summary in summaries.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(summary.to_dict()))
    seen = set()
    for names in (*itertools.permutations(JOBS, 2), *itertools.islice(itertools.permutations(JOBS, 3), 0, None, 17)):
        paths = [str(tmp_path / f"{name}.json") for name in names]
        arguments = ["compare", *paths, "--fail-on", "slower", "-o", str(tmp_path / "page.html")]
        done = CliRunner().invoke(main, arguments)
        comparison = compare(*paths)
        check(comparison, done.output, done.exit_code)
        seen |= {difference.step.verdict for difference in comparison.differences}
    assert seen == {"faster", "slower", "same", "unknown"}


def test_unprofiled_steps_that_differ_leave_it_open() -> None:
    comparison = compare(healthy(), healthy())
    (difference,) = comparison.differences
    assert words.headline(comparison, difference).startswith("Within noise: ")
    step = replace(difference.step, baseline_unprofiled_us=40e3, candidate_unprofiled_us=19e3)
    assert words.headline(comparison, replace(difference, step=step)) == (
        f"Not certain: the recorded steps of {comparison.runs[1].label} show no difference, but unprofiled steps "
        "changed from 40.0 ms to 19.0 ms."
    )


def test_unprofiled_steps_that_change_the_other_way_are_no_noise() -> None:
    comparison = compare(healthy(), healthy())
    (difference,) = comparison.differences
    step = replace(difference.step, baseline_us=30e3, candidate_us=39e3, confirmed=False)
    assert words.headline(comparison, replace(difference, step=step)).startswith("Within noise: ")
    step = replace(step, baseline_unprofiled_us=25e3, candidate_unprofiled_us=15e3)
    assert words.headline(comparison, replace(difference, step=step)) == (
        f"Not certain: the recorded step time of {comparison.runs[1].label} changed from 30.0 ms to 39.0 ms, but "
        "unprofiled steps changed from 25.0 ms to 15.0 ms."
    )


def test_several_candidates_are_named_with_what_they_are(summaries: dict[str, Summary]) -> None:
    comparison = compare(*(summaries[name] for name in ("plain", "straggler", "half the batch")))
    assert [difference.step.verdict for difference in comparison.differences] == ["slower", "faster"]
    slow, fast = (run.label for run in comparison.runs[1:])
    title = words.title(comparison)
    assert title.startswith(f"Of 2 candidates {fast} is the fastest, ")
    assert title.endswith(f"; {slow} is significantly slower.")
    assert words.failures(comparison, ["slower"]) == [f"--fail-on slower: the steps of {slow} are significantly slower"]
