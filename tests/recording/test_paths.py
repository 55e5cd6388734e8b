"""A rank's files are found again by the names under which they are written."""

from pathlib import Path

from perfscope.recording import paths


def test_what_a_stuck_rank_writes_is_named_after_it() -> None:
    folder = Path("recording")
    assert paths.stacks_file(folder, 3).name == "rank-00003.stacks.txt"
    assert paths.flight_file(folder, 3).name == "rank-00003.flight.pickle"
    assert paths.rank_of_stacks_file(paths.stacks_file(folder, 123456)) == 123456
    assert paths.rank_of_flight_file(paths.flight_file(folder, 7, "json")) == 7


def test_no_other_file_is_taken_for_one() -> None:
    assert paths.rank_of_stacks_file(Path("rank-00003.stacks.txt.partial")) is None
    assert paths.rank_of_flight_file(Path("rank-00003.capture-0.trace.json")) is None
