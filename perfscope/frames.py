"""A summary's tables as pandas DataFrames: ``summary.frames.collectives``."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import pandas as pd

from perfscope.frame_columns import frame_of
from perfscope.frame_tables import TABLES, columns, rows
from perfscope.summary import Summary


class Frames:
    """Every table of one summary as a DataFrame, made when it is first asked for.

    Each is an attribute (``frames.accounting``), and all are there by name: ``frames["accounting"]``, ``list(frames)``,
    ``frames.describe("accounting")``. Units stand in the columns' names (``_us``, ``_bytes``, ``_gbps``; shares are
    0..1); what the data cannot support is missing (NaN, ``<NA>`` or None). A table without rows has its columns all the
    same, with the same types.
    """

    def __init__(self, summary: Summary) -> None:
        self._summary = summary

    @cached_property
    def job(self) -> pd.DataFrame:
        """What was run and how long its steps took: one row. Model, settings and versions are in ``summary.job``."""
        return self._made("job")

    @cached_property
    def steps(self) -> pd.DataFrame:
        """Time of each used step."""
        return self._made("steps")

    @cached_property
    def accounting(self) -> pd.DataFrame:
        """Where each rank's step went, means per step: the ten rows of the account add up to ``step_time_us``."""
        return self._made("accounting")

    @cached_property
    def named_host(self) -> pd.DataFrame:
        """Parts of the account's ``idle_host_us`` that have a visible name: garbage collection, checkpoints."""
        return self._made("named_host")

    @cached_property
    def clock(self) -> pd.DataFrame:
        """What was added to each rank's clock to meet the lowest rank's."""
        return self._made("clock")

    @cached_property
    def collectives(self) -> pd.DataFrame:
        """Collectives by group, kind, type and size."""
        return self._made("collectives")

    @cached_property
    def last_arrivers(self) -> pd.DataFrame:
        """Who came last in the collectives, a row for each of these ranks."""
        return self._made("last_arrivers")

    @cached_property
    def cost_model(self) -> pd.DataFrame:
        """The fitted cost of a collective by group and kind: t(S) = alpha + S·f(n)/B."""
        return self._made("cost_model")

    @cached_property
    def groups(self) -> pd.DataFrame:
        """Process groups and what they are for."""
        return self._made("groups")

    @cached_property
    def stragglers(self) -> pd.DataFrame:
        """Who made the others wait, worst first."""
        return self._made("stragglers")

    @cached_property
    def critical_path(self) -> pd.DataFrame:
        """The work that fixes the step time; its rows add up to it. Empty where it was not computed."""
        return self._made("critical_path")

    @cached_property
    def dataloader(self) -> pd.DataFrame:
        """Each rank's data loading, per step."""
        return self._made("dataloader")

    @cached_property
    def utilisation(self) -> pd.DataFrame:
        """Model FLOPs utilisation of the whole job: one row."""
        return self._made("utilisation")

    @cached_property
    def flops_by_dtype(self) -> pd.DataFrame:
        """Types in which the model's FLOPs ran."""
        return self._made("flops_by_dtype")

    @cached_property
    def memory(self) -> pd.DataFrame:
        """Peak memory, headroom and allocation retries of each rank."""
        return self._made("memory")

    @cached_property
    def memory_timeline(self) -> pd.DataFrame:
        """Memory over the used steps, a row for each point of its course."""
        return self._made("memory_timeline")

    @cached_property
    def kernels(self) -> pd.DataFrame:
        """Device work by name, the costliest first."""
        return self._made("kernels")

    @cached_property
    def operators(self) -> pd.DataFrame:
        """Operators by name, the costliest first."""
        return self._made("operators")

    @cached_property
    def modules(self) -> pd.DataFrame:
        """Named ranges (modules, phases) and the device work launched in them, the costliest first."""
        return self._made("modules")

    @cached_property
    def launches(self) -> pd.DataFrame:
        """How each rank feeds its device."""
        return self._made("launches")

    @cached_property
    def plan(self) -> pd.DataFrame:
        """All changes that can be replayed, played together: one row, none for fewer than two."""
        return self._made("plan")

    @cached_property
    def curves(self) -> pd.DataFrame:
        """Predicted step time over the values of settings that can be replayed, a row for each point."""
        return self._made("curves")

    @cached_property
    def pipeline(self) -> pd.DataFrame:
        """The job's pipeline: one row, none where there is no pipeline."""
        return self._made("pipeline")

    @cached_property
    def stages(self) -> pd.DataFrame:
        """The pipeline's stages, per step, means over their ranks."""
        return self._made("stages")

    @cached_property
    def history(self) -> pd.DataFrame:
        """Every step of the run, captured or not, in stretches of consecutive steps."""
        return self._made("history")

    @cached_property
    def history_ranks(self) -> pd.DataFrame:
        """Each rank's steps over the whole run."""
        return self._made("history_ranks")

    @cached_property
    def history_stages(self) -> pd.DataFrame:
        """The stages of each rank's steps over the whole run; with ``other`` they add up to the step."""
        return self._made("history_stages")

    @cached_property
    def outlier_steps(self) -> pd.DataFrame:
        """Steps of the run that took far longer than those around them, the longest first."""
        return self._made("outlier_steps")

    @cached_property
    def slow_ranks(self) -> pd.DataFrame:
        """Ranks that spent more of the run's steps in a stage than their peers, the largest excess first."""
        return self._made("slow_ranks")

    @cached_property
    def hosts(self) -> pd.DataFrame:
        """What each host did during the used steps, where the system sampler ran."""
        return self._made("hosts")

    @cached_property
    def devices(self) -> pd.DataFrame:
        """What each accelerator did during the used steps, where the system sampler ran."""
        return self._made("devices")

    @cached_property
    def throttled(self) -> pd.DataFrame:
        """Why devices ran below their highest clocks, a row for each reason."""
        return self._made("throttled")

    @cached_property
    def processes(self) -> pd.DataFrame:
        """What each rank's process and its data loader workers did, where the system sampler ran."""
        return self._made("processes")

    @cached_property
    def system_timeline(self) -> pd.DataFrame:
        """Hosts and devices over time around the used steps, a row for each look at each quantity."""
        return self._made("system_timeline")

    @cached_property
    def cost(self) -> pd.DataFrame:
        """What the job costs: one row, none where no price was given."""
        return self._made("cost")

    @cached_property
    def savings(self) -> pd.DataFrame:
        """What each finding saves in a day, where a price was given; the plan of all of them comes last."""
        return self._made("savings")

    @cached_property
    def replay(self) -> pd.DataFrame:
        """How well the unchanged step replays: one row."""
        return self._made("replay")

    @cached_property
    def findings(self) -> pd.DataFrame:
        """What to change, the gravest first."""
        return self._made("findings")

    @cached_property
    def evidence(self) -> pd.DataFrame:
        """The numbers that the findings rest on."""
        return self._made("evidence")

    @cached_property
    def notes(self) -> pd.DataFrame:
        """What must be known to judge the numbers: what is missing, bounded, perturbed or assumed."""
        return self._made("notes")

    @cached_property
    def failures(self) -> pd.DataFrame:
        """Ranks that could not be analyzed, and why."""
        return self._made("failures")

    @cached_property
    def strips(self) -> pd.DataFrame:
        """One typical step of each rank as the account saw it, a row for each stretch."""
        return self._made("strips")

    @cached_property
    def lanes(self) -> pd.DataFrame:
        """One step's timeline of the most telling ranks, a row for each entry of a lane."""
        return self._made("lanes")

    def describe(self, name: str) -> pd.DataFrame:
        """What each column of a table is: its name, unit, dtype and meaning. Raises KeyError for no such table."""
        self._known(name)
        told = ("name", "unit", "dtype", "meaning")
        described: pd.DataFrame = pd.DataFrame(
            {"column" if what == "name" else what: [getattr(column, what) for column in columns(name)] for what in told}
        )
        return described

    def __getitem__(self, name: str) -> pd.DataFrame:
        """The table of that name. Raises KeyError, naming those that there are."""
        self._known(name)
        frame: pd.DataFrame = getattr(self, name)
        return frame

    def __iter__(self) -> Iterator[str]:
        return iter(TABLES)

    def __len__(self) -> int:
        return len(TABLES)

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name} ({sum(1 for _ in rows(name, self._summary))})" for name in TABLES)
        return f"<Frames of {self._summary.source or 'a summary'}: {sizes}>"

    def _made(self, name: str) -> pd.DataFrame:
        return frame_of(columns(name), rows(name, self._summary))

    def _known(self, name: str) -> None:
        if name not in TABLES:
            raise KeyError(f"no table {name!r}; there are {', '.join(TABLES)}")
