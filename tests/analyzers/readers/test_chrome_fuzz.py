"""A small run of the fuzzer on fixed inputs; ``python -m tests.benchmarks.fuzz_chrome`` runs more of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.analyzers.readers import fuzz


@pytest.mark.parametrize("seed", range(4))
def test_mutated_traces_neither_crash_nor_lose_in_silence(seed: int) -> None:
    ends, failures = fuzz.run_many(seed, 0, 500)

    assert failures == []
    assert ends.total() == 500
    # Every kind of input came with every kind of end: what was fuzzed is the reader, not its first check.
    assert {end.split(": ")[0] for end in ends} == {"text", "packed", "cut", "one event"}
    assert {end.split(": ")[1] for end in ends} == {"whole", "with drops", "refused"}


def test_an_input_can_be_repeated() -> None:
    assert [fuzz.case_of(3, number).content for number in range(50)] == [
        fuzz.case_of(3, number).content for number in range(50)
    ]


def test_the_fuzzer_notices_dropped_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An oracle that cannot fail shows nothing: a reader that drops every last event in silence must be caught."""
    real = fuzz.chrome.read

    def lossy(path: Path, slice_bytes: int, compiled: bool = True):  # type: ignore[no-untyped-def]
        content = path.read_bytes()
        at = content.rfind(b'{"ph')
        path.write_bytes(content[:at] + b"{}" + content[content.find(b"}", at) + 1 :])
        return real(path, slice_bytes=slice_bytes)

    monkeypatch.setattr(fuzz.chrome_scan, "IS_BUILT", False)  # nothing to compare with
    monkeypatch.setattr(fuzz.chrome, "read", lossy)
    assert len(fuzz.run_many(0, 0, 100)[1]) > 10
