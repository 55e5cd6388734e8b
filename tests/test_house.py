"""The layout stays as it was laid: ``python -m tests.house`` prints the measures that are held here."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests import house


@pytest.fixture(scope="module")
def modules() -> dict[str, house.Module]:
    """The product's modules."""
    return house.read()


def test_no_package_has_children_that_import_each_other_in_a_loop(modules: dict[str, house.Module]) -> None:
    assert house.cycles(modules) == []


def test_the_analysis_goes_one_way(modules: dict[str, house.Module]) -> None:
    assert house.against_the_order(modules) == []


def test_import_chains_stay_short(modules: dict[str, house.Module]) -> None:
    chain = house.longest_chain(modules)
    assert len(chain) <= 20, " > ".join(chain)


def test_one_name_one_class(modules: dict[str, house.Module]) -> None:
    repeated, classes = house.repeated_classes(modules)
    assert sum(repeated.values()) < 0.05 * classes, repeated


def test_folders_can_be_looked_over(modules: dict[str, house.Module]) -> None:
    folder, size = house.biggest_folder(modules)
    assert size <= 25, folder


def test_contracts_can_be_read() -> None:
    assert house.contract_lines() <= 50


def test_every_package_says_what_it_is_for(modules: dict[str, house.Module]) -> None:
    silent = [name for name, module in modules.items() if module.is_package and not module.is_documented]
    assert silent == []


def test_marks_that_make_chooses_files_by_stand_in_the_tests_own_files(root: Path) -> None:
    """``make test`` looks for them there: tests that have a mark from a helper alone would not be run."""
    makefile = (root / "Makefile").read_text()
    chosen = {name for names in re.findall(r"call marked,([\w|]+)", makefile) for name in names.split("|")}
    whole = re.search(r"^WHOLE := (.+)$", makefile, flags=re.MULTILINE)
    assert whole is not None
    assert chosen == {*whole[1].split(" or "), "alone", "frameworks"}
    named = re.compile(rf"\bmark\.({'|'.join(chosen)})\b")
    helpers = (path for path in (root / "tests").rglob("*.py") if not path.name.startswith("test_"))
    assert [path for path in helpers if named.search(path.read_text(encoding="utf-8"))] == []


def test_the_measures_see_what_they_measure(modules: dict[str, house.Module]) -> None:
    """A reader that imports what imports it is a cycle and an import against the order; a name can be used twice."""
    low, high = "perfscope.analyzers.readers.chrome", "perfscope.analyzers.summarize"
    more = frozenset({high})
    broken = {
        **modules,
        low: replace(modules[low], at_load=modules[low].at_load | more, anywhere=modules[low].anywhere | more),
    }
    assert [package for package, _ in house.cycles(broken)] == ["perfscope.analyzers"]
    assert len(house.against_the_order(broken)) == 1
    twice = {**modules, low: replace(modules[low], classes=modules[high].classes * 2 + ("Summary",))}
    assert "Summary" in house.repeated_classes(twice)[0]
