"""A rank's analysis, from the cache where its file was read before.

The cache stores two things for each file: its analysis (``.rank``, a few 100 KB), so that the next one is instant, and
the trace itself (Parquet, where pyarrow is installed), so that a newer version of PerfScope need not parse it again.
"""

from __future__ import annotations

import dataclasses
import enum
import io
import pickle
from pathlib import Path
from typing import Any, Final

import perfscope
from perfscope import analyzers
from perfscope.analyzers import readers, stored_traces
from perfscope.analyzers.rank.analyze import analyze_rank
from perfscope.analyzers.rank.partial import RankPartial
from perfscope.errors import TraceError
from perfscope.execution.cache import Cache, Content, fingerprint
from perfscope.execution.pickle_sizes import check_sizes
from perfscope.recording import remote
from perfscope.trace import trace as trace_module
from perfscope.trace.custom_flops import CustomFlops
from perfscope.trace.trace import Trace

_DIGEST_BYTES: Final = 16
_NUMPY: Final = {"_reconstruct", "_frombuffer", "scalar", "ndarray", "dtype"}
"""What numpy's own pickles call."""


def analyze_file(
    path: Path,
    part: str | None = None,
    *,
    use_cache: bool = True,
    flops: CustomFlops | None = None,
    execution: Path | None = None,
) -> RankPartial:
    """Read and analyze one rank, unless that was done before. ``path`` may be remote.

    With an ``execution`` trace the rank is always analyzed anew.
    ``part`` is the rank meant in a file that holds several (``readers.parts``), ``flops`` the user's own formulas.
    Raises TraceError naming the file. A file that changes while it is read is analyzed, but not stored.
    """
    if execution is not None:
        return analyze_rank(read_trace(path, part, execution), flops)
    cache = Cache.from_environment() if use_cache else None
    if remote.is_remote(path):
        return _analyze_remote(path, part, cache, flops)
    content = cache.content(path) if cache else None
    if cache is None or content is None:
        return analyze_rank(readers.read(path, part), flops)
    known = _load(cache, content.key, path, part, flops)
    if known is not None:
        return known
    partial = analyze_rank(_trace(cache, content, part), flops)
    if content.is_current():
        cache.save(_entry(content.key, path, part, flops), lambda target: target.write_bytes(_pack(partial, path)))
    return partial


def recall(path: Path, part: str | None = None, flops: CustomFlops | None = None) -> RankPartial | None:
    """The analysis of a file that was read before and has not changed since, without reading it; None for others."""
    cache = Cache.from_environment()
    if cache is None:
        return None
    if remote.is_remote(path):
        version = remote.version(path)
        key = cache.recall(version) if version else None
    else:
        content = cache.known_content(path)
        key = content.key if content else None
    return _load(cache, key, path, part, flops) if key else None


def read_trace(path: Path, part: str | None = None, execution: Path | None = None) -> Trace:
    """One rank's trace, from the cache where it is stored there. ``path`` may be remote.

    What the trace lacks is taken from its ``execution`` trace, if that can be read.
    Raises TraceError, naming the file, where it cannot be read.
    """
    if execution is not None:
        return _completed(read_trace(path, part), execution)
    if remote.is_remote(path):
        with remote.fetched(path) as local:
            return read_trace(local, part)
    cache = Cache.from_environment()
    content = cache.content(path) if cache else None
    return _trace(cache, content, part) if cache and content else readers.read(path, part)


def _completed(trace: Trace, path: Path) -> Trace:
    from perfscope.analyzers.readers import execution

    try:
        if not remote.is_remote(path):
            return execution.complete(trace, execution.read(path))
        with remote.fetched(path) as local:
            return execution.complete(trace, execution.read(local))
    except TraceError as error:
        return execution.unusable(trace, error)


def trim() -> None:
    """Remove the cache's oldest entries beyond its bound."""
    cache = Cache.from_environment()
    if cache is not None:
        cache.trim()


def _analyze_remote(path: Path, part: str | None, cache: Cache | None, flops: CustomFlops | None) -> RankPartial:
    version = remote.version(path) if cache else None
    key = cache.recall(version) if cache and version else None
    known = _load(cache, key, path, part, flops) if cache and key else None
    if known is not None:
        return known
    with remote.fetched(path) as local:
        try:
            partial = analyze_file(local, part, use_cache=cache is not None, flops=flops)
        except TraceError as error:
            raise TraceError(str(error).replace(str(local), str(path))) from error
        content = cache.content(local) if cache and version else None
        if cache and version and content:
            cache.remember(version, content.key)
    return dataclasses.replace(partial, source=partial.source.replace(str(local), str(path)))


def _load(cache: Cache, key: str, path: Path, part: str | None, flops: CustomFlops | None) -> RankPartial | None:
    partial = cache.load(_entry(key, path, part, flops), lambda entry: _unpack(entry.read_bytes()))
    return dataclasses.replace(partial, source=f"{path}{partial.source}") if partial else None


def _trace(cache: Cache, content: Content, part: str | None) -> Trace:
    path = content.path
    if not stored_traces.is_supported():
        return readers.read(path, part)
    made_by = fingerprint(trace_module, readers, stored_traces)
    name = f"{content.key}.{made_by}{_variant(path, part)}"
    trace = stored_traces.load(name, cache, path)
    if trace is None:
        trace = readers.read(path, part)
        if content.is_current():
            stored_traces.save(trace, name, cache, path)
    return trace


def _entry(key: str, path: Path, part: str | None, flops: CustomFlops | None) -> str:
    made_by = fingerprint(perfscope, analyzers) + (f"-{flops.digest}" if flops else "")
    return f"{key}.{made_by}{_variant(path, part)}.rank"


def _variant(path: Path, part: str | None) -> str:
    """What determines the trace besides the file's content: its suffix, and the rank in it."""
    return f"{path.suffix}.{part}" if part is not None else path.suffix


def _pack(partial: RankPartial, path: Path) -> bytes:
    """A partial in bytes, without its file's path, which may differ next time."""
    body = pickle.dumps(dataclasses.replace(partial, source=partial.source.removeprefix(str(path))), protocol=5)
    return _digest(body) + body


def _unpack(data: bytes) -> RankPartial:
    digest, body = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
    if _digest(body) != digest:
        raise pickle.UnpicklingError("damaged")
    check_sizes(body)
    partial = _ValuesOnly(io.BytesIO(body)).load()
    if not isinstance(partial, RankPartial):
        raise pickle.UnpicklingError("not a rank's analysis")
    return partial


def _digest(body: bytes) -> bytes:
    import hashlib  # loads OpenSSL, which an analysis without the cache does without

    return hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest()


class _ValuesOnly(pickle.Unpickler):
    """Unpickles this package's values and numpy's arrays: a planted entry cannot make it call anything else."""

    def find_class(self, module: str, name: str) -> Any:
        top = module.partition(".")[0]
        if top == "numpy" and name in _NUMPY:
            return super().find_class(module, name)
        if top == "perfscope" and "." not in name:
            value = super().find_class(module, name)
            if isinstance(value, type) and (dataclasses.is_dataclass(value) or issubclass(value, enum.Enum)):
                return value
        raise pickle.UnpicklingError(f"{module}.{name} is not a value")
