"""NCCL Inspector's logs: wait and transfer computed by hand, sizes as the plugin's own bandwidths have them."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest

from perfscope.analyzers.analyze import analyze
from perfscope.analyzers.job.collectives.inspector import inspector_costs, inspector_rows
from perfscope.analyzers.readers import inspector as reader
from perfscope.errors import PerfscopeError, TraceError
from perfscope.recording import inspector
from perfscope.reports.page import page
from perfscope.results.anonymous import anonymous
from perfscope.results.communication.inspector import InspectorRow
from tests.analyzers.job.collectives.inspector_logs import line, write


def rows_of(records: list[dict[str, Any]], folder: Path) -> tuple[InspectorRow, ...]:
    write(folder, {0: records})
    return inspector_rows(reader.read(folder / "node-a-pid100.log").operations)


def test_the_shortest_kernel_is_the_transfer(tmp_path: Path) -> None:
    """The example of the module: kernels of 9, 5 and 6 µs, then of 7, 4 and 4; rank 2 did not log a third."""
    times = [(9, 5, 6), (7, 4, 4), (100, 100, None)]
    records = [
        line(rank, number, us, ranks=3)
        for number, each in enumerate(times)
        for rank, us in enumerate(each)
        if us is not None
    ]
    (row,) = rows_of(records, tmp_path)
    assert (row.count, row.matched) == (3, 2)
    assert row.transfer_us == pytest.approx(4.5)
    assert row.wait_us == pytest.approx((4 + 0 + 1 + 3 + 0 + 0) / 6)
    assert row.last_arriver == {1: 1.0}
    assert row.longest_us == 100
    assert row.algbw_gbps == pytest.approx((1 << 20) / 4.5e3)
    assert row.busbw_gbps == pytest.approx((1 << 20) / 4.5e3 * 4 / 3)


@pytest.mark.parametrize(
    ("operation", "size", "us", "ranks", "algorithm", "bus"),
    [  # the plugin's own examples: its README, and that of its exporter
        ("AllReduce", 17179869184, 61974, 8, 277.210914, 485.119099),
        ("ReduceScatter", 2147483648, 41057, 8, 418.439467, 366.134533),
        ("ReduceScatter", 65536, 110, 32, 19.065018, 18.469236),
    ],
)
def test_bandwidths_are_those_that_the_plugin_logs(
    operation: str, size: int, us: int, ranks: int, algorithm: float, bus: float, tmp_path: Path
) -> None:
    records = [line(rank, 1, us, operation=operation, size=size, ranks=ranks) for rank in range(ranks)]
    (row,) = rows_of(records, tmp_path)
    assert row.algbw_gbps == pytest.approx(algorithm, rel=1e-6)
    assert row.busbw_gbps == pytest.approx(bus, rel=1e-6)


def test_the_cost_model_is_fitted_to_transfers(tmp_path: Path) -> None:
    """t(S) = 20 µs + S / 100 GB/s; rank 1 always waits."""
    records = [
        line(rank, 10 * number + at, 20 + (1 << (20 + number)) / 1e5 + 30 * rank, size=1 << (20 + number))
        for number in range(4)
        for at in range(3)
        for rank in range(2)
    ]
    (cost,) = inspector_costs(rows_of(records, tmp_path))
    assert cost.alpha_us == pytest.approx(20, rel=1e-3)
    assert cost.busbw_gbps == pytest.approx(100, rel=1e-3)


def job(folder: Path) -> None:
    """Four processes: a communicator of all, and one of processes 2 and 3, in which they are 0 and 1."""
    records: dict[int, list[dict[str, Any]]] = {}
    for rank in range(4):
        # Rank 3 comes last: its kernels are the shortest.
        world = [line(rank, at, 50 if rank == 3 else 90, ranks=4, coll_algo="Ring") for at in range(5)]
        pair = [
            line(rank - 2, at, 30 + rank, communicator="0xb", process=rank, header={"comm_name": "tp"})
            for at in range(3)
        ]
        sent = [line(rank, at, 12, operation="Send", ranks=4, p2p_peer=0) for at in range(2)]
        records[rank] = [*world, *(pair if rank > 1 else []), *sent]
    write(folder, records)


def test_a_folder_of_logs(tmp_path: Path) -> None:
    job(tmp_path)
    summary = analyze(tmp_path)
    assert summary.job.ranks == (0, 1, 2, 3)
    # Of the world 5 x 3 x 40 µs, all for rank 3; of the pair 3 x 1 µs for rank 2.
    assert summary.verdict.headline.startswith("16 operations of NCCL: ")
    assert "99.5% of that for rank 3" in summary.verdict.headline
    rows = {row.group: row for row in summary.inspector if row.kind == "all_reduce"}
    assert rows["tp"].ranks == (2, 3)  # global ranks, by process
    assert rows["tp"].last_arriver == {2: 1.0}
    assert rows["0x7f8c496ae9f661"].algorithm == "Ring"
    assert rows["0x7f8c496ae9f661"].last_arriver == {3: 1.0}
    (sends,) = (row for row in summary.inspector if row.kind == "send")
    assert (sends.count, sends.transfer_us, sends.wait_us) == (8, 12, None)
    assert {row.group for row in summary.collectives} == {row.group for row in summary.inspector}
    html = page.render(summary)
    assert '<table id="inspector"' in html
    assert '<table id="collectives"' in html


def test_logs_in_a_recording_and_packed_ones_are_found(tmp_path: Path) -> None:
    job(tmp_path / inspector.FOLDER)
    place = tmp_path / inspector.FOLDER / "node-a-pid100.log"
    (tmp_path / "node-a-pid100.log.gz").write_bytes(gzip.compress(place.read_bytes()))
    place.unlink()
    (tmp_path / "train.log").write_text("epoch 1, loss 0.3\n")
    assert len(inspector.beside(tmp_path)) == 3
    assert analyze(tmp_path).job.ranks == (0, 1, 2, 3)


def test_names_are_replaced_where_that_is_asked_and_markup_is_text(tmp_path: Path) -> None:
    name = {"comm_name": "<b>acme</b> token=hunter2-abcdef"}
    write(tmp_path, {rank: [line(rank, 1, 5, header=name)] for rank in range(2)})
    html = page.render(analyze(tmp_path))
    assert "<b>acme" not in html
    assert "hunter2" not in html
    assert "node-a" not in json.dumps(anonymous(analyze(tmp_path)).to_dict())


@pytest.mark.parametrize("us", [0, -1.0, 1e-320, 9e-4, 1e12, None, "5"])
def test_a_time_that_no_kernel_takes_is_damage(us: Any, tmp_path: Path) -> None:
    write(tmp_path, {0: [line(0, number, time, operation="Send") for number, time in enumerate((5.0, us))]})
    log = reader.read(tmp_path / "node-a-pid100.log")
    assert [each.us for each in log.operations] == [5.0]
    assert log.damaged == 1


def test_damaged_lines_cost_themselves(tmp_path: Path) -> None:
    write(tmp_path, {rank: [line(rank, at, 5) for at in range(3)] for rank in range(2)})
    path = tmp_path / "node-a-pid100.log"
    path.write_bytes(path.read_bytes() + b'{"header": {"id": \n\xff\xfe\n[1]\n' + b"x" * (3 << 20) + b"\n")
    summary = analyze(tmp_path)
    (failure,) = summary.job.failures
    assert "4 lines cannot be read; the others are used" in failure.error
    assert summary.inspector[0].matched == 3


VALUES: tuple[Any, ...] = (
    None,
    -1,
    0,
    2**63,
    -(2**70),
    1.5,
    float("inf"),
    "",
    "x" * 5000,
    [],
    {},
    [[1]],
    {"a": 1},
    True,
)


def test_values_of_other_types_never_break_it(tmp_path: Path) -> None:
    rng = random.Random(4)
    for number in range(150):
        records = [line(rank, at, 5) for at in range(3) for rank in range(2)]
        for record in records:
            holder = record[rng.choice(list(record))]
            holder[rng.choice(list(holder))] = rng.choice(VALUES)
        try:
            rows = rows_of(records, tmp_path / str(number))
        except TraceError:
            continue
        inspector_costs(rows)


def test_a_log_without_operations_is_refused(tmp_path: Path) -> None:
    (tmp_path / "node-a-pid1.log").write_text('{"header": {"id": "0x1", "rank": 0, "n_ranks": 2}}\n')
    with pytest.raises(PerfscopeError, match=r"node-a-pid1.log: holds no operation of NCCL Inspector"):
        analyze(tmp_path)
