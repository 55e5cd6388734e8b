"""What a Chrome trace says of its collectives and their process groups."""

from __future__ import annotations

import json

import numpy as np

from perfscope.analyzers.readers.chrome_columns import Columns
from perfscope.analyzers.readers.chrome_metadata import ranks_of
from perfscope.trace import NONE, CollectiveArgs, Int32, Int64, ProcessGroup

_ELISION = "..."
"""torch leaves out the middle of long lists of ranks."""


def of(
    columns: Columns, rows: Int64, groups: tuple[ProcessGroup, ...]
) -> tuple[CollectiveArgs, tuple[ProcessGroup, ...]]:
    """(collectives of the events at ``rows`` of the file, in that order, groups completed by what the events say)."""
    table = columns.finish_collectives()
    place = np.full(columns.rows, NONE, dtype=np.int64)
    place[rows] = np.arange(len(rows))
    row = place[table["row"]]
    order = np.argsort(row, kind="stable")
    order = order[row[order] != NONE]
    groups = groups + _groups_of_events(columns, table, {group.name for group in groups})
    ranks = _complete_ranks(columns, table["group"], table["ranks"], {group.name: group.ranks for group in groups})
    collectives = CollectiveArgs(
        row=row[order],
        kind=table["kind"][order].astype(np.int32),
        group=table["group"][order].astype(np.int32),
        ranks=ranks[order],
        dtype=table["dtype"][order].astype(np.int32),
        elements_in=table["elements_in"][order],
        elements_out=table["elements_out"][order],
        group_size=table["group_size"][order],
        sequence=table["sequence"][order],
        peer=table["peer"][order],
    )
    return collectives, groups


def _groups_of_events(columns: Columns, table: dict[str, Int64], known: set[str]) -> tuple[ProcessGroup, ...]:
    """Groups that only the events name: the list of groups may be missing, or older than they are."""
    strings = columns.strings.values
    found: dict[str, ProcessGroup] = {}
    said = zip(table["group"].tolist(), table["description"].tolist(), table["ranks"].tolist(), strict=True)
    for group, description, ranks in sorted(set(said)):
        name = strings[group] if group != NONE else ""
        if name and name not in known and name not in found:
            listed = ranks_of(strings[ranks]) if ranks != NONE else ()
            found[name] = ProcessGroup(name, strings[description] if description != NONE else "", listed)
    return tuple(found.values())


def _complete_ranks(columns: Columns, group: Int64, ranks: Int64, known: dict[str, tuple[int, ...]]) -> Int32:
    """Lists of ranks with what was left out of them, where the group's own list has it."""
    strings = columns.strings
    completed = ranks.astype(np.int32)
    for group_id, ranks_id in set(zip(group.tolist(), ranks.tolist(), strict=True)):
        if NONE in (group_id, ranks_id) or _ELISION not in strings.values[ranks_id]:
            continue
        if whole := known.get(strings.values[group_id]):
            completed[(group == group_id) & (ranks == ranks_id)] = strings.ids[json.dumps(list(whole))]
    return completed
