"""Every packing, whole and damaged."""

from __future__ import annotations

import gzip
import io
import os
import sys
import zipfile
from pathlib import Path

import pytest

from perfscope.analyzers.readers import chrome, sources
from perfscope.errors import TraceError
from tests.analyzers.readers.helpers import event, names, save

EVENTS = [event(f"op {at} {os.urandom(20).hex()}", ts=at) for at in range(4000)]
NAMES = [entry["name"] for entry in EVENTS]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return save(tmp_path_factory.mktemp("plain"), {"traceEvents": EVENTS, "record_shapes": 1}).read_bytes()


def zipped(*members: tuple[str, bytes]) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members:
            archive.writestr(name, content)
    return data.getvalue()


def in_members(data: bytes) -> bytes:
    cut = len(data) // 3
    return gzip.compress(data[:cut]) + b"\0" * 512 + gzip.compress(b"") + gzip.compress(data[cut:])


zstd = pytest.importorskip("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd")


def in_frames(data: bytes) -> bytes:
    cut = len(data) // 3
    skippable = b"\x50\x2a\x4d\x18" + (5).to_bytes(4, "little") + b"notes"
    packed: bytes = skippable + zstd.compress(data[:cut]) + zstd.compress(b"") + skippable + zstd.compress(data[cut:])
    return packed


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz", "trace.pt"])
@pytest.mark.parametrize(
    "pack",
    [bytes, gzip.compress, in_members, lambda data: gzip.compress(data) + b"\0" * 100,
     lambda data: zipped(("trace.json", data)), lambda data: zipped(("__MACOSX/x", b""), ("a/", b""), ("a/t", data)),
     zstd.compress, in_frames],
    ids=["plain", "gzip", "gzip of several members", "padded gzip", "zip", "zip with clutter", "zstd", "zstd frames"],
)  # fmt: skip
def test_packing_is_recognized_by_content(tmp_path: Path, plain: bytes, pack, name: str) -> None:  # type: ignore[no-untyped-def]
    trace = chrome.read(save(tmp_path, pack(plain), name))

    assert names(trace) == NAMES
    assert trace.parse_report.notes == ()
    assert not trace.parse_report.truncated


def test_gzip_cut_anywhere_gives_what_was_written(tmp_path: Path, plain: bytes) -> None:
    packed = gzip.compress(plain)
    kept = 0
    for length in range(len(packed) // 10, len(packed) - 100, len(packed) // 10):
        trace = chrome.read(save(tmp_path, packed[:length]))
        assert trace.parse_report.truncated
        assert trace.parse_report.notes[0] == "the gzip stream ends before its end mark"
        assert names(trace) == NAMES[: len(trace)]
        assert len(trace) > kept
        kept = len(trace)
    assert kept > 3000


def test_gzip_without_its_checksum_is_whole_but_reported(tmp_path: Path, plain: bytes) -> None:
    trace = chrome.read(save(tmp_path, gzip.compress(plain)[:-8]))

    assert names(trace) == NAMES
    assert not trace.parse_report.truncated
    assert trace.parse_report.notes == ("the gzip stream ends before its end mark",)


def test_gzip_with_a_wrong_checksum_is_read_to_its_end(tmp_path: Path, plain: bytes) -> None:
    packed = bytearray(gzip.compress(plain))
    packed[-6] ^= 0xFF
    trace = chrome.read(save(tmp_path, bytes(packed)))

    assert names(trace) == NAMES
    assert "the gzip stream is damaged" in trace.parse_report.notes[0]


def test_damage_in_a_later_member_costs_only_what_follows(tmp_path: Path, plain: bytes) -> None:
    first, second = gzip.compress(plain[:200_000]), bytearray(gzip.compress(plain[200_000:]))
    second[20:60] = bytes(40)
    trace = chrome.read(save(tmp_path, first + bytes(second)))

    assert names(trace)[:1000] == NAMES[:1000]
    assert "damaged" in trace.parse_report.notes[0]


def test_bytes_after_the_gzip_stream_are_reported(tmp_path: Path, plain: bytes) -> None:
    trace = chrome.read(save(tmp_path, gzip.compress(plain) + b"and more"))

    assert names(trace) == NAMES
    assert trace.parse_report.notes == ("bytes that are not gzip follow the gzip stream",)


def test_zip_with_a_wrong_checksum_is_read(tmp_path: Path, plain: bytes) -> None:
    packed = bytearray(zipped(("trace.json", plain)))
    with zipfile.ZipFile(io.BytesIO(bytes(packed))) as archive:
        checksum = archive.infolist()[0].CRC.to_bytes(4, "little")
    packed = bytearray(bytes(packed).replace(checksum, b"\1\2\3\4"))
    trace = chrome.read(save(tmp_path, bytes(packed)))

    assert len(trace) > 3000
    assert "the zip archive is damaged" in trace.parse_report.notes[0]


def test_zstd_cut_or_damaged_anywhere_gives_what_precedes(tmp_path: Path, plain: bytes) -> None:
    packed = zstd.compress(plain)
    for length in range(len(packed) // 2, len(packed) - 10, len(packed) // 10):
        cut = chrome.read(save(tmp_path, packed[:length]))
        assert cut.parse_report.truncated
        assert cut.parse_report.notes[0] == "the zstd stream ends before its end mark"
        assert names(cut) == NAMES[: len(cut)]
        assert len(cut) > 500
    damaged = bytearray(packed)
    damaged[-len(packed) // 4 :] = bytes(len(packed) // 4 + 1)
    trace = chrome.read(save(tmp_path, bytes(damaged)))
    assert "the zstd stream is damaged" in trace.parse_report.notes[0]
    assert names(trace)[:500] == NAMES[:500]


def test_bytes_after_the_zstd_stream_are_reported(tmp_path: Path, plain: bytes) -> None:
    trace = chrome.read(save(tmp_path, zstd.compress(plain) + b"and more"))

    assert names(trace) == NAMES
    assert "the zstd stream" in trace.parse_report.notes[0]


def test_zstd_without_a_library_names_what_to_install(
    tmp_path: Path, plain: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "_ZSTD_MODULES", ("no.such.module",))
    with pytest.raises(TraceError, match=r"trace\.json: .*pip install 'perfscope-profiler\[zstd\]'"):
        chrome.read(save(tmp_path, zstd.compress(plain)))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (zipped(("a.json", b"{}"), ("b.json", b"{}")), "has 2 files instead of one trace; unpack it first"),
        (zipped(), "has 0 files"),
        (zipped(("a.json", b"{}"))[:-10], "cut short or damaged; copy it again"),
    ],
)
def test_unusable_zip_names_the_remedy(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(TraceError, match=r"trace\.json: the zip archive .*" + message):
        chrome.read(save(tmp_path, content))


@pytest.mark.parametrize("pack", [bytes, gzip.compress, lambda data: zipped(("t", data)), zstd.compress])
def test_head_and_tail(tmp_path: Path, pack) -> None:  # type: ignore[no-untyped-def]
    data = bytes(range(256)) * 5
    path = save(tmp_path, pack(data))

    assert sources.read_head(path, 300) == data[:300]
    assert sources.read_head(path, 5000) == data
    for count in (1, 256, 300, 700, 5000):
        assert sources.read_tail(path, count, packed_limit=1 << 20) == data[-count:]
    assert sources.read_tail(path, 5, packed_limit=1) == (data[-5:] if pack is bytes else None)
