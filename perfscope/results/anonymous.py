"""A summary that may be shown outside: hosts, users, paths, addresses, models, modules and ranges under other names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any, Final

from perfscope.results.file import summary_from_dict
from perfscope.results.summary import Summary

_FIELDS: Final = {
    "host": "host", "hosts": "host",
    "function": "function", "file": "file", "calls": "call",
}  # fmt: skip
"""Fields whose values name somebody's own things, and what they are called instead."""

_TABLES: Final = {
    ("model", "name"): "model", ("modules", "name"): "module",
    **{(table, "module"): "module" for table in ("holders", "growth", "ooms")},
    **{(table, "label"): "range" for table in ("holders", "growth", "ooms")},
    **{(table, "modules"): "module" for table in ("compiled", "kernels", "operators")},
    **{(table, "lines"): "line" for table in ("compiled", "kernels", "operators")},
    ("compiled", "code"): "code", ("compiled_modules", "module"): "module", ("compiled_modules", "kind"): "class",
}  # fmt: skip
"""The same for fields of a table that others have too."""

_FRAMEWORKS: Final = re.compile(
    r"$|unknown$|(?:forward|backward|optimizer|dataloader|evaluation|communication)$"
    r"|(?:perfscope|megatron|aten|autograd|c10d|nccl|gloo|FSDP|torch)::?|ProfilerStep|Optimizer\.|enumerate\(DataLoader"
    r"|DistributedDataParallel\.|FullyShardedDataParallel\.|torch[./]"
)
"""Names that frameworks give: they stay, since everybody has them."""

_ADDRESS: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s\"'<>]*[^\s\"'<>.,;:)\]]")
_PATH: Final = re.compile(r"(?<![\w.:/~-])(?:~|[A-Za-z]:(?=\\))?(?:[\\/][^\s\\/\"'`<>|:;,()\[\]{}]+){2,}[\\/]?")
_HOME: Final = re.compile(r"[\\/](?:home|Users|users)[\\/]([^\\/\s\"']+)")


class _Names:
    """What stands for each name, the same wherever it occurs."""

    def __init__(self) -> None:
        self.known: dict[str, str] = {}
        self._counts: dict[str, int] = {}

    def alias(self, name: str, kind: str) -> str:
        """``kind`` and a number; a file keeps its ending."""
        if name not in self.known:
            number = self._counts[kind] = self._counts.get(kind, 0) + 1
            ending = PurePosixPath(name).suffix if kind in ("file", "path") else ""
            self.known[name] = f"{kind}-{number}{ending if re.fullmatch(r'[.][A-Za-z]{1,5}', ending) else ''}"
        return self.known[name]


def anonymous(summary: Summary) -> Summary:
    """``summary`` with numbers for the names of hosts, users, folders, addresses, models, modules, and of users' ranges
    and functions; the command line is left out.

    One name has one number throughout, in sentences too. Operators and kernels keep their names: without them nothing
    could be looked up. A name that is an ordinary lower-case word (``loss``) is replaced where it stands alone, not in
    sentences.
    """
    document = summary.to_dict()
    names = _Names()
    for kind, name in _named(document):
        names.alias(name, kind)
    for text in _texts(document):
        for user in _HOME.findall(text):
            names.alias(user, "user")
    telling = sorted((name for name in names.known if _is_telling(name)), key=len, reverse=True)
    words = re.compile("|".join(rf"(?<![\w-]){re.escape(name)}(?![\w-])" for name in telling) or r"(?!)")

    def replaced(text: str) -> str:
        if text in names.known:
            return names.known[text]
        text = _ADDRESS.sub(lambda found: names.alias(found[0], "address"), text)
        text = _PATH.sub(lambda found: names.alias(found[0], "path"), text)
        return words.sub(lambda found: names.known[found[0]], text)

    changed = _mapped(document, replaced)
    changed["source"] = "recording"
    changed["job"]["command"] = []
    return summary_from_dict(changed)


def _named(document: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Names and their kinds, those of hosts first."""
    found = [*_in_fields(document, "")]
    for lane in document.get("lanes", ()):
        if lane["kind"] == "range":
            found += [("range", text) for text in lane["texts"]]
    for row in (document.get("roles") or {}).get("rows", ()):
        found += [("range", text) for text in row["phases"]]
    found += [("file", PurePosixPath(name).name) for kind, name in found if kind == "file"]  # as sentences name them
    own = [(kind, name) for kind, name in found if not _FRAMEWORKS.match(name)]
    yield from sorted(own, key=lambda one: one[0] != "host")


def _in_fields(value: Any, within: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for field, each in value.items():
            kind = _FIELDS.get(field) or _TABLES.get((within, field))
            if kind is not None:
                yield from ((kind, text) for text in _texts(each))
            else:
                yield from _in_fields(each, str(field))
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _in_fields(each, within)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _texts(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _texts(each)


def _is_telling(name: str) -> bool:
    """Is it a name by its looks, so that replacing it cannot hurt a sentence?"""
    return len(name) > 2 and re.fullmatch(r"[A-Z]?[a-z]+|[\d.]+", name) is None


def _mapped(value: Any, replaced: Any) -> Any:
    if isinstance(value, str):
        return replaced(value)
    if isinstance(value, Mapping):
        return {replaced(key) if isinstance(key, str) else key: _mapped(each, replaced) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_mapped(each, replaced) for each in value]
    return value
