"""Tools about work: kernels, operators, collectives, memory and data loading, and any other table of the analysis."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from perfscope.errors import UnusableInput, did_you_mean
from perfscope.results.frames import TABLES
from perfscope.results.summary import Summary
from perfscope.server.answers import About, Answer, TableRow, WorkHead
from perfscope.server.folder import Recording
from perfscope.server.tool import Capture, Contains, OrderBy, RecordingName, Tools, table_answer, tool

_ANY_ROW = {"type": "object", "description": "A row of the table; list_tables and define say what its columns mean."}


class WorkTools(Tools):
    """Tables."""

    @tool("Kernels on the devices", WorkHead, "kernels")
    def kernels(
        self,
        recording: RecordingName,
        contains: Contains = None,
        order_by: OrderBy = None,
        capture: Capture = None,
    ) -> Answer:
        """List the device kernels, the costliest first: time per rank and step, calls, share of the device work, the
        operator that launched them, TFLOP/s, tensor cores, and the rank on which they are slowest.

        Use it for "which kernel takes most time", "is this kernel slow on one rank". Empty without a device.
        """
        return self._named(recording, "kernels", contains, order_by, capture)

    @tool("Operators", WorkHead, "operators")
    def operators(
        self,
        recording: RecordingName,
        contains: Contains = None,
        order_by: OrderBy = None,
        capture: Capture = None,
    ) -> Answer:
        """List PyTorch operators, the costliest first: calls, device time, own host time, kernels and FLOPs per rank
        and step.

        Use it for "which operator takes most time"; on CPUs, where there are no kernels, host_us_per_step is the time.
        """
        return self._named(recording, "operators", contains, order_by, capture)

    @tool("Collectives and messages", WorkHead, "collectives")
    def collectives(
        self,
        recording: RecordingName,
        contains: Annotated[
            str | None, Field(description="Only this kind: all_reduce, all_gather, reduce_scatter, send_recv …")
        ] = None,
        order_by: OrderBy = None,
        capture: Capture = None,
    ) -> Answer:
        """List the collectives by process group, kind, type and size: how many, transfer time, wait for the last rank,
        algorithm and bus bandwidth.

        Use it for "is the network slow", "what is sent". Waiting is not the network's: stragglers says who was late.
        Which rank came last in which collective is in table last_arrivers, the fitted cost in table cost_model.
        """
        return self._named(recording, "collectives", contains, order_by, capture, column="kind")

    @tool("Memory of the ranks", WorkHead, "memory")
    def memory(self, recording: RecordingName, order_by: OrderBy = None, capture: Capture = None) -> Answer:
        """List each rank's peak memory, what is left of the device's, fragmentation and allocation retries.

        Use it for "does a larger batch fit", "is memory running out". Memory over time is in table memory_timeline.
        """
        return self._named(recording, "memory", None, order_by, capture)

    @tool("Data loading of the ranks", WorkHead, "dataloader")
    def data_loading(self, recording: RecordingName, order_by: OrderBy = None, capture: Capture = None) -> Answer:
        """List each rank's data loading per step: the wait for batches, the part of it that delays the step, what a
        batch costs one worker, and the number of workers.

        Use it for "is the training waiting for data".
        """
        return self._named(recording, "dataloader", None, order_by, capture)

    @tool("Tables of the analysis", About, TableRow)
    def list_tables(
        self,
        recording: Annotated[str | None, Field(description="Count the rows of this recording, too.")] = None,
        capture: Capture = None,
    ) -> Answer:
        """List every table that table can read, with its columns: critical path, process groups, pipeline stages,
        launches, modules, hosts, timeline and others.
        """
        found = None if recording is None else self.opened(recording, capture)[1]
        rows = [
            TableRow(
                table=name,
                meaning=str(table.__doc__),
                rows=None if found is None else sum(1 for _ in table.rows(found)),
                columns=tuple(column.name for column in table.columns),
            )
            for name, table in TABLES.items()
        ]
        return Answer(fixed=About(), rows=rows, state=str(recording))

    @tool("Rows of any table", WorkHead, _ANY_ROW)
    def table(
        self,
        recording: RecordingName,
        table: Annotated[str, Field(description="Name of the table, as list_tables gives it.")],
        columns: Annotated[list[str] | None, Field(description="Only these columns. Default: all.")] = None,
        where: Annotated[
            dict[str, str | int | float | bool] | None,
            Field(
                description="Column -> value that rows must have; of a text a part is enough, of a list one element."
            ),
        ] = None,
        order_by: OrderBy = None,
        capture: Capture = None,
    ) -> Answer:
        """Read rows of any table of the analysis that list_tables names, with filters and an order.

        Use it where no other tool has the answer: critical_path (what fixes the step time), groups, stages and
        pipeline, launches, modules, lanes (the timeline of one step), hosts, devices, clock, notes, failures.
        """
        if table not in TABLES:
            raise UnusableInput(f"no table {table!r}{did_you_mean(table, TABLES)}; list_tables names all")
        place, found = self.opened(recording, capture)
        head = _head(place, found, table)
        return table_answer(head, place, found, table, where=where, order_by=order_by, columns=columns or ())

    def _named(
        self,
        name: str,
        table: str,
        contains: str | None,
        order_by: str | None,
        capture: int | None,
        column: str = "name",
    ) -> Answer:
        place, found = self.opened(name, capture)
        where: dict[str, Any] | None = None if contains is None else {column: contains}
        return table_answer(_head(place, found, table), place, found, table, where=where, order_by=order_by)


def _head(recording: Recording, found: Summary, table: str) -> WorkHead:
    empty = next(TABLES[table].rows(found), None) is None
    return WorkHead(
        recording=recording.name,
        notes=(f"The recording has no row of {table}: {_why(found, table)}.",) if empty else (),
        table=table,
        step_time_us=found.job.step_time_us,
        ranks=len(found.job.ranks),
    )


def _why(found: Summary, table: str) -> str:
    """Why a table may be empty, and what to do."""
    if not found.time_breakdown:
        return "it holds no traces, only step histories or dumps"
    if table == "kernels" and set(found.job.devices) <= {"CPU"}:
        return "no device was used; operators has the work on CPUs"
    if table == "memory":
        return "record with --memory to have it"
    return "there was none, or what shows it was not recorded"
