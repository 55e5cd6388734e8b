"""What Holistic Trace Analysis reports of each trace, as it comes and with its defects taken out one after the other.

Runs in HTA's own interpreter, of which PerfScope is no part; ``tests.benchmarks.agreement`` calls it:

    HTA_PYTHON agreement_hta.py TRACE...

Prints JSON: trace -> variant -> quantity -> number (µs, or a count), or ``{"error": …}``.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

ROUNDING = "HTA_DISABLE_NS_ROUNDING"
DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset", "Kernel", "Memcpy", "Memset")


def load(path: str, *, last_step: bool = False, filtered: bool = True) -> Any:
    """HTA's own loading of one rank, optionally with the last step; unfiltered keeps every row of the file."""
    from hta.common.trace import Trace
    from hta.trace_analysis import TraceAnalysis

    theirs = Trace._filter_irrelevant_gpu_kernels
    if not filtered:
        Trace._filter_irrelevant_gpu_kernels = lambda self, include_last_profiler_step=False: None
    try:
        return TraceAnalysis(
            trace_files={0: Path(path).name}, trace_dir=str(Path(path).parent), include_last_profiler_step=last_step
        )
    finally:
        Trace._filter_irrelevant_gpu_kernels = theirs


def keep_device_work(analysis: Any) -> None:
    """Drop rows that have a stream but are no kernel, copy or memset."""
    names = analysis.t.symbol_table.get_sym_id_map()
    work = {names[name] for name in DEVICE_WORK if name in names}
    for rank, rows in analysis.t.traces.items():
        analysis.t.traces[rank] = rows[rows["stream"].eq(-1) | rows["cat"].isin(work)].copy()


def count_in_ns(analysis: Any) -> None:
    """Give HTA its times in ns, so that what it cuts to whole numbers is cut to ns."""
    for rows in analysis.t.traces.values():
        for column in ("ts", "dur", "end"):
            rows[column] = (rows[column] * 1000).round()


def quantities(analysis: Any, per_us: float = 1.0) -> dict[str, float]:
    """What HTA's public functions return, in µs."""
    from hta.utils.utils import get_kernel_type

    whole = analysis.get_temporal_breakdown(visualize=False).iloc[0]
    types, _ = analysis.get_gpu_kernel_breakdown(visualize=False, include_memory_kernels=True)
    overlap = analysis.get_comm_comp_overlap(visualize=False).iloc[0]["comp_comm_overlap_pctg"]
    by_type = types.set_index("kernel_type")["sum"].to_dict()

    def time_of(*wanted: str, without: str = "-") -> float:
        return (
            sum(us for name, us in by_type.items() if all(w in name for w in wanted) and without not in name) / per_us
        )

    found = {
        "total": whole["kernel_time(us)"] / per_us,
        "idle": whole["idle_time(us)"] / per_us,
        "compute": whole["compute_time(us)"] / per_us,
        "not compute": whole["non_compute_time(us)"] / per_us,
        "communication": time_of("COMMUNICATION"),
        "exposed communication": time_of("COMMUNICATION", without="COMPUTATION"),
        "hidden communication": time_of("COMMUNICATION", "COMPUTATION"),
        "copies and memsets": time_of("MEMORY"),
        "hidden share, %": 0.0 if overlap != overlap else overlap,
    }
    rows = analysis.t.traces[0]
    rows = rows[rows["stream"].ne(-1)]
    names = analysis.t.symbol_table.get_sym_table()
    kinds = rows["name"].map(lambda number: get_kernel_type(names[number]))
    for kind, called in (("COMPUTATION", "compute kernels"), ("COMMUNICATION", "communication kernels")):
        found[f"{called}, number"] = int(kinds.eq(kind).sum())
        found[f"{called}, sum"] = rows.loc[kinds.eq(kind), "dur"].sum() / per_us
    found["copies and memsets, number"] = int(kinds.eq("MEMORY").sum())
    return {name: float(value) for name, value in found.items()}


def variants(path: str) -> dict[str, Any]:
    """As it comes; with the last step; without rounding; with unlinked work; of device work only; in ns."""
    measured: dict[str, Any] = {}

    def measure(name: str, make: Any, per_us: float = 1.0) -> Any:
        try:
            analysis = make()
            measured[name] = quantities(analysis, per_us)
        except Exception as error:  # whatever HTA raises is its result for this trace
            measured[name] = {"error": f"{type(error).__name__}: {error}".rstrip(": ")}
            return None
        return analysis

    os.environ[ROUNDING] = "0"
    measure("as it comes", lambda: load(path))
    measure("last step", lambda: load(path, last_step=True))
    os.environ[ROUNDING] = "1"
    measure("rounding", lambda: load(path, last_step=True))
    analysis = measure("unlinked", lambda: load(path, filtered=False))
    if analysis is not None:

        def changed(change: Any) -> Any:
            change(analysis)
            return analysis

        measure("rows", lambda: changed(keep_device_work))
        measure("truncation", lambda: changed(count_in_ns), per_us=1000.0)
    return measured


def main() -> int:
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    json.dump({path: variants(path) for path in sys.argv[1:]}, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
