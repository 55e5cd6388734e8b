"""Traces as Parquet, complete, so that a trace read once need not be parsed again.

One trace is five tables, ``NAME.strings.parquet``, ``.collectives``, ``.graph_nodes``, ``.memory`` and ``.events``;
other fields are JSON in the schema metadata of the events. Any Parquet reader opens them. Needs pyarrow (the ``cache``
extra).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from perfscope.execution.cache import Cache
from perfscope.trace.trace import CollectiveArgs, GraphNodes, MemoryCounter, Trace

_METADATA: Final = b"perfscope.trace"
_TABLES: Final = {"collectives": CollectiveArgs, "graph_nodes": GraphNodes, "memory": MemoryCounter}
"""Fields of a trace that are tables of their own length."""
_TYPES: Final = typing.get_type_hints(Trace)


def is_supported() -> bool:
    """Whether pyarrow is installed and works: with an incompatible numpy it raises any kind of exception."""
    try:
        import pyarrow.parquet  # noqa: F401 - is what is asked
    except Exception:
        return False
    return True


def save(trace: Trace, name: str, cache: Cache, path: Path) -> None:
    """Store the trace that was read from ``path`` in the cache; a failure has no effect."""
    with contextlib.suppress(Exception):  # the analysis has its trace in any case
        tables = {"strings": _table({"text": _binary(trace.strings)})}
        for field in _TABLES:
            tables[field] = _table(_columns(getattr(trace, field)))
        rest = {key: getattr(trace, key) for key in _rest()}
        rest["source"] = trace.source.removeprefix(str(path))
        # Last, so that a trace with events is complete.
        tables["events"] = _table(_columns(trace)).replace_schema_metadata({_METADATA: msgspec.json.encode(rest)})
        for part, table in tables.items():
            cache.save(_entry(name, part), functools.partial(_write, table))


def load(name: str, cache: Cache, path: Path) -> Trace | None:
    """Load a trace from the cache, as read from ``path``; None where it is not complete there."""
    strings = cache.load(_entry(name, "strings"), lambda entry: _texts(_read(entry)))
    tables: dict[str, Any] = {}
    for field, kind in _TABLES.items():
        tables[field] = cache.load(_entry(name, field), functools.partial(_read_as, kind))
    if strings is None or None in tables.values():
        return None
    return cache.load(_entry(name, "events"), lambda entry: _assemble(_read(entry), strings, tables, path))


def _assemble(events: Any, strings: tuple[str, ...], tables: dict[str, Any], path: Path) -> Trace:
    """The trace from its tables. Raises where they do not fit together, so that the entry is removed."""
    rest = msgspec.json.decode(events.schema.metadata[_METADATA])
    trace = Trace(
        source=f"{path}{rest['source']}",
        strings=strings,
        **_arrays(events),
        **tables,
        **{key: msgspec.convert(rest[key], _TYPES[key]) for key in _rest()},
    )
    trace.self_check()
    return trace


def _texts(table: Any) -> tuple[str, ...]:
    return tuple(text.decode("utf-8", "surrogatepass") for text in table.column("text").to_pylist())


def _entry(name: str, part: str) -> str:
    return f"{name}.{part}.parquet"


def _table(columns: dict[str, Any]) -> Any:
    import pyarrow as pa

    return pa.Table.from_arrays(list(columns.values()), names=list(columns))


def _columns(owner: Any) -> dict[str, Any]:
    values = {field.name: getattr(owner, field.name) for field in dataclasses.fields(owner)}
    return {name: _array(value) for name, value in values.items() if isinstance(value, np.ndarray)}


def _array(column: np.ndarray[Any, Any]) -> Any:
    """An Arrow array over a column's own memory: ``pyarrow.array`` first imports pandas, which takes 0.2 s."""
    import pyarrow as pa

    if column.dtype.kind not in "iuf":
        raise TypeError(f"columns of {column.dtype} have another layout in Arrow")
    kind = pa.from_numpy_dtype(column.dtype)
    return pa.Array.from_buffers(kind, len(column), [None, pa.py_buffer(np.ascontiguousarray(column))])


def _binary(texts: Sequence[str]) -> Any:
    import pyarrow as pa

    encoded = [text.encode("utf-8", "surrogatepass") for text in texts]
    offsets = np.zeros(len(encoded) + 1, dtype=np.int64)
    np.cumsum([len(each) for each in encoded], out=offsets[1:])
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(encoded))]
    return pa.Array.from_buffers(pa.large_binary(), len(encoded), buffers)


def _rest() -> list[str]:
    """The trace's fields that are neither columns nor tables nor strings; ``source`` is handled separately."""
    special = {"source", "strings", *_TABLES}
    return [
        field.name
        for field in dataclasses.fields(Trace)
        if field.name not in special and typing.get_origin(_TYPES[field.name]) is not np.ndarray
    ]


def _read_as(kind: type, path: Path) -> Any:
    return kind(**_arrays(_read(path)))


def _arrays(table: Any) -> dict[str, Any]:
    return {name: _column(table.column(name)) for name in table.column_names}


def _column(chunks: Any) -> np.ndarray[Any, Any]:
    """As ``to_numpy``, without its import of pandas."""
    dtype = np.dtype(str(chunks.type))
    parts = [np.empty(0, dtype)]
    for chunk in chunks.chunks:
        if chunk.null_count:
            raise ValueError("a column has nulls")
        parts.append(np.frombuffer(chunk.buffers()[1], dtype)[chunk.offset : chunk.offset + len(chunk)])
    return parts[-1] if len(parts) <= 2 else np.concatenate(parts)


def _write(table: Any, path: Path) -> None:
    from pyarrow import parquet

    # Dictionaries and statistics are for queries; without them writing takes half the time.
    parquet.write_table(
        table,
        path,
        compression="zstd",
        use_dictionary=False,
        write_statistics=False,
        write_page_checksum=True,
    )


def _read(path: Path) -> Any:
    from pyarrow import parquet

    with parquet.ParquetFile(path, page_checksum_verification=True) as file:
        return file.read(use_threads=False)
