"""What predictions say of their accuracy is what docs/whatif.md lists, prediction by prediction."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

from perfscope.results.accuracy import CLOSE, EMULATED, NONE, REAL, SIMULATED, Accuracy, accuracy_in_words, kind


def _tables(root: Path) -> list[list[list[str]]]:
    """Cells of every table of the document, its head apart."""
    tables: list[list[list[str]]] = []
    before = ""
    for line in (root / "docs/whatif.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("|"):
            if not before.startswith("|"):
                tables.append([])
            tables[-1].append([cell.strip() for cell in line.strip("|").split("|")])
        before = line
    return tables


def _of(cell: str) -> tuple[int, int]:
    part, _, whole = cell.partition(" of ")
    return (int(part), int(whole)) if whole else (0, 0)


def test_simulated_jobs_are_counted_as_documented(root: Path) -> None:
    (table,) = (rows for rows in _tables(root) if rows[0][:2] == ["setting", "requested"])
    documented = {}
    for name, _requested, known, _median, _worst, assumed, inside, _refused in table[2:]:
        close = _of(known)[0] + _of(assumed)[0]
        documented[name.strip("`")] = Accuracy(_of(inside)[1], close, _of(inside)[0])
    assert documented == SIMULATED


def test_emulated_jobs_are_counted_as_documented(root: Path) -> None:
    (table,) = (rows for rows in _tables(root) if rows[0][:2] == ["setting", "asked"])
    first = table[0].index("of many steps: within 5 %")
    documented = {}
    for name, *cells in table[2:]:
        (close, made), (inside, _) = (_of(cell.partition(" (")[0]) for cell in cells[first - 1 : first + 1])
        documented[name.strip("`")] = Accuracy(made, close, inside)
    every = documented.pop("all")
    assert documented == EMULATED
    assert sum(documented.values(), NONE) == every


def test_real_trainings_are_counted_as_documented(root: Path) -> None:
    (table,) = (rows for rows in _tables(root) if rows[0][:2] == ["scenario", "setting"])
    counted: dict[str, Accuracy] = defaultdict(lambda: Accuracy(0, 0, 0))
    for _scene, setting, _before, _noise, _predicted, _measured, inside, error in table[2:]:
        name = kind(setting.strip("`").partition("=")[0])
        off = abs(float(error.rstrip("%"))) / 100
        counted[name] += Accuracy(1, int(off <= CLOSE), int("yes" in inside))
    assert counted == REAL


def test_of_several_changes_the_least_accurate_kind_is_named() -> None:
    text = accuracy_in_words({"compute": "2x", "rank.3": "peers"})
    assert text.startswith("Predictions of rank.N so far: within 5% of the true step time in")
    made = SIMULATED["rank.N"] + EMULATED["rank.N"] + REAL["rank.N"]
    assert re.search(rf"between low and high in {made.inside} of {made.made}\.$", text)


def test_one_training_makes_no_share() -> None:
    text = accuracy_in_words(["rank.3"])
    assert REAL["rank.N"].made == 1
    assert "real trainings" not in text
    assert "real trainings" in accuracy_in_words(["zero.stage"])
    alone = next(name for name, real in REAL.items() if name not in SIMULATED and name not in EMULATED)
    assert f"{REAL[alone].made} real trainings" in accuracy_in_words([alone])


def test_a_kind_that_was_never_compared_says_so() -> None:
    assert (
        accuracy_in_words(["host.pauses"]) == "No prediction of host.pauses has been compared with a measured step yet."
    )
