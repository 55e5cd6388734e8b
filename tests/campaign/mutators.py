"""Changes of files that keep most of their structure: of bytes, JSON values, SQLite databases and packed files."""

from __future__ import annotations

import gzip
import io
import json
import random
import sqlite3
import zipfile
from contextlib import closing, suppress
from typing import Any

from tests.analyzers.readers.fuzz import TOKENS
from tests.recording.mutations import VALUES

_MORE = (
    2**53 + 1, 10**12, -(2**63), 1e-320, -0.0, 0.1, 1e15, "9" * 400, "\x9b31m", "\u202eabc", "[0, 1, 99999999999]",
    "nccl:send 0->9999999999", [0] * 3, ["a", "b", "c"], [[1, 2], [3]], {"name": "x", "ts": 1}, "../../x", "-", "0x10",
)  # fmt: skip
_ALL = (*VALUES, *_MORE)
_CELLS = (*(value for value in _ALL if isinstance(value, str | float | None)), b"\xff\xfe", 2**62, -1, 0, 7)


def change_bytes(data: bytes, dice: random.Random) -> bytes:
    """One to four changes: other bits and bytes, pieces cut out, doubled, replaced, tokens put in, the end cut off."""
    changed = bytearray(data)
    for _ in range(dice.choice((1, 1, 1, 2, 4))):
        at = dice.randrange(len(changed) + 1)
        length = min(int(dice.expovariate(0.05)), 400)
        way = dice.randrange(8)
        if way == 0 and at < len(changed):
            changed[at] ^= 1 << dice.randrange(8)
        elif way == 1 and at < len(changed):
            changed[at] = dice.randrange(256)
        elif way == 2:
            del changed[at:]
        elif way == 3:
            del changed[at : at + length]
        elif way == 4:
            source = dice.randrange(len(changed) + 1)
            changed[at:at] = changed[source : source + length]
        elif way == 5:
            changed[at : at + dice.choice((1, 2, 4, 8))] = dice.randbytes(dice.choice((1, 2, 4, 8)))
        elif way == 6:
            changed[at : at + dice.choice((2, 4, 8))] = dice.choice((b"\0", b"\xff", b"\x7f")) * 8
        else:
            changed[at:at] = dice.choice(TOKENS)
    return bytes(changed)


def change_value(document: Any, dice: random.Random) -> Any:
    """One to three values of a JSON document (which is changed) become others, vanish, are repeated or swapped."""
    holder = [document]
    for _ in range(dice.choice((1, 1, 1, 2, 3))):
        _change_one(holder, dice)
    return holder[0]


def _change_one(within: Any, dice: random.Random) -> None:
    owner, key = within, 0
    # Down to a leaf, by chance less deep; nothing above the document itself is changed.
    while True:
        inner = owner[key]
        if not isinstance(inner, (dict, list)) or not inner or (owner is not within and dice.random() < 0.12):
            break
        owner, key = inner, dice.choice(list(inner)) if isinstance(inner, dict) else dice.randrange(len(inner))
    way = dice.random()
    if owner is within:
        owner[key] = dice.choice(_ALL)
    elif way < 0.1:
        del owner[key]
    elif way < 0.17 and isinstance(owner, list):
        owner[key:key] = owner[key : key + 1] * dice.choice((1, 2, 40))
    elif way < 0.25:
        other = dice.choice(list(owner)) if isinstance(owner, dict) else dice.randrange(len(owner))
        owner[key], owner[other] = owner[other], owner[key]
    elif way < 0.4 and isinstance(owner[key], (int, float)) and not isinstance(owner[key], bool):
        owner[key] = owner[key] * dice.choice((-1, 0, 2, 1000, 10**6, 10**12, 0.5)) + dice.choice((0, 0, 1, -1))
    else:
        owner[key] = json.loads(json.dumps(dice.choice(_ALL)))


def change_json(data: bytes, dice: random.Random) -> bytes:
    """A document with values changed, or, less often, its text."""
    if dice.random() < 0.25:
        return change_bytes(data, dice)
    return json.dumps(change_value(json.loads(data), dice)).encode()


def change_lines(data: bytes, dice: random.Random) -> bytes:
    """The same of a file with a document in each line; lines are repeated, swapped and dropped, too."""
    lines = data.splitlines()
    at = dice.randrange(len(lines))
    way = dice.random()
    if way < 0.2:
        return change_bytes(data, dice)
    if way < 0.3:
        lines[at:at] = [dice.choice(lines)] * dice.choice((1, 30))
    elif way < 0.4:
        del lines[at]
    else:
        lines[at] = json.dumps(change_value(json.loads(lines[at]), dice)).encode()
    return b"\n".join(lines) + b"\n"


def change_sqlite(data: bytes, dice: random.Random) -> bytes:
    """Cells, columns, tables and rows of a database; less often its bytes."""
    if dice.random() < 0.2:
        return change_bytes(data, dice)
    with closing(sqlite3.connect(":memory:")) as database:
        database.deserialize(data)
        tables = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        for _ in range(dice.choice((1, 1, 2, 3))):
            with suppress(sqlite3.Error, IndexError):  # the table or its last column is gone
                _change_table(database, dice.choice(tables), dice)
        database.commit()
        return database.serialize()


def _change_table(database: sqlite3.Connection, table: str, dice: random.Random) -> None:
    column = dice.choice([row[1] for row in database.execute(f"PRAGMA table_info({table})")])
    rows = [row for (row,) in database.execute(f"SELECT rowid FROM {table}")]
    where = f"WHERE rowid = {dice.choice(rows)}" if rows and dice.random() < 0.6 else ""
    way = dice.random()
    if way < 0.7:
        value = dice.choice(_CELLS)
        if isinstance(value, str):
            value = value.encode("utf-8", "replace").decode()
        database.execute(f"UPDATE {table} SET {column} = ? {where}", (value,))
    elif way < 0.8:
        database.execute(f"DELETE FROM {table} {where}")
    elif way < 0.85:
        database.execute(f"ALTER TABLE {table} RENAME COLUMN {column} TO other")
    elif way < 0.9:
        database.execute(f"DROP TABLE {table}")
    elif way < 0.95:
        columns = ", ".join(row[1] for row in database.execute(f"PRAGMA table_info({table})"))
        database.execute(f"INSERT INTO {table} ({columns}) SELECT {columns} FROM {table} {where}")
    else:
        database.execute(f"ALTER TABLE {table} DROP COLUMN {column}")


def pack(data: bytes, dice: random.Random) -> bytes:
    """As gzip or zip; every other time with damage in the packing."""
    if dice.random() < 0.6:
        packed = gzip.compress(data, 1, mtime=0)
    else:
        held = io.BytesIO()
        with zipfile.ZipFile(held, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(zipfile.ZipInfo("trace.json"), data)
        packed = held.getvalue()
    return change_bytes(packed, dice) if dice.random() < 0.5 else packed
