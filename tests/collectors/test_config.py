"""The collector's options: rank lists, limits, and how they are saved and loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from perfscope.collectors.config import CollectorConfig, RankSelection


@pytest.mark.parametrize(
    ("text", "inside", "outside"),
    [
        ("all", {0, 1, 1023}, set()),
        ("0", {0}, {1}),
        ("0,3-5", {0, 3, 4, 5}, {1, 2, 6}),
        (" 7 , 2-2 ", {2, 7}, {0, 3}),
    ],
)
def test_rank_lists(text: str, inside: set[int], outside: set[int]) -> None:
    selection = RankSelection.parse(text)
    assert {rank for rank in inside | outside if rank in selection} == inside


@pytest.mark.parametrize("text", ["", "x", "1-", "-1", "3-1", "1,,2", "all,1", "1-2-3"])
def test_nonsense_rank_lists_are_refused_with_a_hint(text: str) -> None:
    with pytest.raises(ValueError, match="write"):
        RankSelection.parse(text)


@pytest.mark.parametrize("option", [{"wait": 0}, {"warmup": -1}, {"active": 0}, {"repeat": 0}, {"ranks": "x"}])
def test_impossible_options_are_refused_by_name(option: dict[str, int | str]) -> None:
    with pytest.raises(ValueError, match=r"must be at least|not a rank"):
        CollectorConfig(output="x", package_root="y", **option)  # type: ignore[arg-type]


def test_counting_operations_needs_a_warmup_step() -> None:
    with pytest.raises(ValueError, match="warmup"):
        CollectorConfig(output="x", package_root="y", warmup=0, count_flops=True)


def test_what_is_saved_is_loaded_and_unknown_options_are_left_out(tmp_path: Path) -> None:
    config = CollectorConfig(output="/rec", package_root="/site", ranks="1-3", wait=2, stacks=True)
    config.save(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(file.read_text().replace("{", '{"from_a_newer_version": 1,', 1))
    assert CollectorConfig.load(tmp_path) == config
