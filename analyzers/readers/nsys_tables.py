"""The tables of an Nsight Systems export: a SQLite file, or a folder with one Parquet file per table.

The schema changes from release to release, so nothing is assumed about it: a missing table reads as empty, a missing
column as NONE (None for text). Rows come in chunks with only the requested columns, so memory is bounded by the chunk
and by what the caller stores.
"""

from __future__ import annotations

import importlib
import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np

from perfscope.errors import TraceError
from perfscope.frozen import dataclass
from perfscope.trace.trace import NONE, Int64
from perfscope.typed import clean

STRINGS_TABLE: Final = "StringIds"
"""In every export: the texts that other tables name by an id."""

PARQUET_SUFFIX: Final = ".parquet"

_CHUNK_ROWS: Final = 100_000
_PROCESS_SHIFT: Final = 24
"""A global thread id is host and VM (16 bits), process (24), thread (24); a global process id has thread 0."""
_LOW_24: Final = (1 << 24) - 1


def is_parquet(folder: Path) -> bool:
    """Whether a folder is an export."""
    return (folder / f"{STRINGS_TABLE}{PARQUET_SUFFIX}").is_file()


def is_sqlite(path: Path) -> bool:
    """Whether a database is an export; true for a damaged one that is called so, of which reading raises the error."""
    query = "SELECT count(*) FROM sqlite_master WHERE type = 'table' AND name = ?"
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro&immutable=1", uri=True)) as database:
            found: int = database.execute(query, (STRINGS_TABLE,)).fetchone()[0]
    except (sqlite3.Error, UnicodeDecodeError):  # the latter: damage in the text of SQLite's own message
        return path.suffix == ".sqlite"
    return found > 0


def process_key(global_id: int) -> int:
    """The part that all global ids of one process have in common."""
    return global_id >> _PROCESS_SHIFT


def pid_of(key: int) -> int:
    """The process id that the operating system gave."""
    return key & _LOW_24


def tid_of(global_tid: int) -> int:
    """The thread id that the operating system gave."""
    return global_tid & _LOW_24


@dataclass(frozen=True)
class Owner:
    """Rows of one process: those whose ``column`` holds a global id of it."""

    column: str
    process: int
    """A ``process_key``."""


@dataclass(frozen=True)
class Prefix:
    """Rows whose text in ``column`` begins with ``text``."""

    column: str
    text: str


Only = Owner | Prefix
"""Which rows to read."""


@dataclass(frozen=True, eq=False)
class Chunk:
    """Some rows of a table. Integers are NONE and texts None where the table has NULL or no such column."""

    rows: int
    integers: dict[str, Int64]
    texts: dict[str, list[str | None]]


class Tables(Protocol):
    """An open export."""

    source: str
    """Path it was read from; for messages."""

    def columns(self, table: str) -> frozenset[str]:
        """Names of a table's columns; empty where there is no such table."""
        ...

    def read(
        self, table: str, integers: Sequence[str], texts: Sequence[str] = (), only: Only | None = None
    ) -> Iterator[Chunk]:
        """The rows of a table, where given only those that ``only`` selects. Raises TraceError on damage."""
        ...

    def count_by(self, table: str, column: str) -> dict[int, int]:
        """Rows of each process, by ``process_key`` of the global ids in ``column``."""
        ...


_COLUMNS: Final = (
    "SELECT info.name FROM sqlite_master AS stored JOIN pragma_table_info(stored.name) AS info "
    "WHERE stored.type = 'table' AND stored.rootpage > 0 AND stored.name = ?"
)
"""Columns that are stored. A view or a virtual table, which no export has, may have rows without end."""


@contextmanager
def opened(path: Path) -> Iterator[Tables]:
    """Open an export. Raises TraceError, naming the file and the remedy, where it cannot be read."""
    if path.is_dir():
        yield _ParquetTables(path)
        return
    with _explained(path):
        location = f"{path.resolve().as_uri()}?mode=ro"
        # In a read-only folder, SQLite cannot make the lock files that some databases need.
        if not os.access(path.resolve().parent, os.W_OK):
            location += "&immutable=1"
        with closing(sqlite3.connect(location, uri=True)) as database:
            database.text_factory = lambda data: data.decode("utf-8", "replace")
            _check_length(path, database)
            yield _SqliteTables(path, database)


def read_rows(
    tables: Tables, table: str, integers: Sequence[str], texts: Sequence[str] = (), only: Only | None = None
) -> Iterator[tuple[Any, ...]]:
    """The rows one by one: the values of ``integers``, then those of ``texts``, clean."""
    for chunk in tables.read(table, integers, texts, only):
        columns: list[list[Any]] = [chunk.integers[name].tolist() for name in integers]
        columns += [[text and clean(text) for text in chunk.texts[name]] for name in texts]
        yield from zip(*columns, strict=True)


def read_strings(tables: Tables, wanted: set[int]) -> dict[int, str]:
    """The texts of the given ids; ids that the export does not have are left out."""
    rows = read_rows(tables, STRINGS_TABLE, ["id"], ["value"]) if wanted else ()
    return {number: text for number, text in rows if number in wanted and text is not None}


def _check_length(path: Path, database: sqlite3.Connection) -> None:
    """SQLite reads what is missing of the last page as zeros, which may pass for the end of a table."""
    (page_bytes,) = database.execute("PRAGMA page_size").fetchone()
    if path.stat().st_size % page_bytes:
        raise TraceError(f"{path}: is cut short; copy it again, or export the report again: nsys export --type sqlite")


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except (sqlite3.Error, UnicodeDecodeError) as error:  # the latter: damage in the text of SQLite's own message
        raise TraceError(
            f"{path}: is damaged or not a SQLite export of Nsight Systems; export the report again: "
            f"nsys export --type sqlite"
        ) from error


class _SqliteTables:
    def __init__(self, path: Path, database: sqlite3.Connection) -> None:
        self.source = str(path)
        self._database = database
        self._columns: dict[str, frozenset[str]] = {}

    def columns(self, table: str) -> frozenset[str]:
        if table not in self._columns:
            rows = self._database.execute(_COLUMNS, (table,))
            self._columns[table] = frozenset(name for (name,) in rows)
        return self._columns[table]

    def read(
        self, table: str, integers: Sequence[str], texts: Sequence[str] = (), only: Only | None = None
    ) -> Iterator[Chunk]:
        there = self.columns(table)
        if not there or (only is not None and only.column not in there):
            return
        # Names come from this package and are in the table; a value of another type than the column's reads as a number
        # or as text all the same.
        asked = [f'CAST(COALESCE("{name}", {NONE}) AS INTEGER)' if name in there else str(NONE) for name in integers]
        asked += [f'CAST("{name}" AS TEXT)' if name in there else "NULL" for name in texts]
        query = f'SELECT {", ".join(asked)} FROM "{table}"'  # noqa: S608
        parameters: tuple[str, ...] = ()
        if isinstance(only, Owner):
            query += f' WHERE ("{only.column}" >> {_PROCESS_SHIFT}) = {only.process}'
        elif isinstance(only, Prefix):
            query += f' WHERE substr("{only.column}", 1, {len(only.text)}) = ?'
            parameters = (only.text,)
        cursor = self._database.execute(query, parameters)
        while rows := cursor.fetchmany(_CHUNK_ROWS):
            columns = list(zip(*rows, strict=True))
            yield Chunk(
                len(rows),
                {name: np.array(columns[at], dtype=np.int64) for at, name in enumerate(integers)},
                {name: list(columns[len(integers) + at]) for at, name in enumerate(texts)},
            )

    def count_by(self, table: str, column: str) -> dict[int, int]:
        if column not in self.columns(table):
            return {}
        key = f'"{column}" >> {_PROCESS_SHIFT}'
        query = f'SELECT {key}, count(*) FROM "{table}" WHERE "{column}" IS NOT NULL GROUP BY 1'  # noqa: S608
        return dict(self._database.execute(query).fetchall())


class _ParquetTables:
    def __init__(self, folder: Path) -> None:
        self.source = str(folder)
        self._folder = folder
        try:
            # Imported by name: it is an optional dependency, and has no types of its own.
            self._parquet: Any = importlib.import_module("pyarrow.parquet")
        except ImportError as error:
            raise TraceError(
                f"{folder}: reading Parquet exports of Nsight Systems needs pyarrow: pip install pyarrow, or export "
                "with nsys export --type sqlite"
            ) from error
        self._columns: dict[str, frozenset[str]] = {}

    def columns(self, table: str) -> frozenset[str]:
        if table not in self._columns:
            path = self._file(table)
            with self._explained(path):
                names = self._parquet.read_schema(path).names if path.exists() else ()
            self._columns[table] = frozenset(names)
        return self._columns[table]

    def read(
        self, table: str, integers: Sequence[str], texts: Sequence[str] = (), only: Only | None = None
    ) -> Iterator[Chunk]:
        there = self.columns(table)
        if not there or (only is not None and only.column not in there):
            return
        wanted = {name for name in (*integers, *texts) if name in there} | ({only.column} if only else set())
        path = self._file(table)
        with self._explained(path):
            for batch in self._parquet.ParquetFile(path).iter_batches(_CHUNK_ROWS, columns=sorted(wanted)):
                if only is not None:
                    batch = batch.filter(self._chosen(batch.column(only.column), only))
                yield Chunk(
                    batch.num_rows,
                    {name: self._integers(batch, name, name in there) for name in integers},
                    {name: self._texts(batch, name, name in there) for name in texts},
                )

    def count_by(self, table: str, column: str) -> dict[int, int]:
        counts: dict[int, int] = {}
        if column in self.columns(table):
            for chunk in self.read(table, [column]):
                ids = chunk.integers[column]
                keys, times = np.unique(ids[ids != NONE] >> _PROCESS_SHIFT, return_counts=True)
                for key, count in zip(keys.tolist(), times.tolist(), strict=True):
                    counts[key] = counts.get(key, 0) + count
        return counts

    def _file(self, table: str) -> Path:
        return self._folder / f"{table}{PARQUET_SUFFIX}"

    @staticmethod
    def _integers(batch: Any, name: str, is_there: bool) -> Int64:
        if not is_there:
            return np.full(batch.num_rows, NONE, dtype=np.int64)
        column = batch.column(name).cast("int64", safe=False).fill_null(NONE)
        return np.asarray(column.to_numpy(zero_copy_only=False), dtype=np.int64)

    @staticmethod
    def _texts(batch: Any, name: str, is_there: bool) -> list[str | None]:
        return list(batch.column(name).cast("string").to_pylist()) if is_there else [None] * batch.num_rows

    @staticmethod
    def _chosen(column: Any, only: Only) -> Any:
        if isinstance(only, Prefix):
            return importlib.import_module("pyarrow.compute").starts_with(column.cast("string"), only.text)
        ids = np.asarray(
            column.cast("int64", safe=False).fill_null(NONE).to_numpy(zero_copy_only=False), dtype=np.int64
        )
        return importlib.import_module("pyarrow").array((ids >> _PROCESS_SHIFT) == only.process)

    @contextmanager
    def _explained(self, path: Path) -> Iterator[None]:
        errors = importlib.import_module("pyarrow").ArrowException
        try:
            yield
        except (errors, OSError) as error:
            raise TraceError(
                f"{path}: is damaged or not a Parquet export of Nsight Systems; export the report again: "
                "nsys export --type parquetdir"
            ) from error
