"""Makes one recording of the folders that the nodes of one run wrote, where no file system was shared."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Final

from perfscope.errors import PerfscopeError, UnusableInput
from perfscope.frozen import dataclass
from perfscope.recording import metadata, paths, remote
from perfscope.recording.metadata import LaunchMetadata, NodeLaunch, RunMetadata

SKEW_S: Final = 600
"""Ranks of one run take their first step together; more between them than this is not their hosts' clocks."""

_OF_RANK: Final = re.compile(r"^rank-(\d{1,6})\.")
_LEFT_OUT: Final = (paths.LAUNCH_FILE, paths.REPORT_FILE)
_ON_A_HOST: Final = re.compile(r"^(?:[\w.-]+@)?([\w.-]+):(.+)$")
"""``HOST:DIR`` and ``USER@HOST:DIR``, as scp and rsync spell them."""


@dataclass(frozen=True)
class GatherResult:
    """What one recording was made of."""

    ranks: tuple[int, ...]
    missing: tuple[int, ...]
    world_size: int
    files: int
    bytes: int


@dataclass(frozen=True)
class _Node:
    """One folder."""

    name: str
    """As the user named it."""
    files: dict[str, Path]
    runs: dict[int, RunMetadata]
    launch: LaunchMetadata | None

    @property
    def ranks(self) -> set[int]:
        """Ranks that left any file."""
        return {int(match[1]) for name in self.files if (match := _OF_RANK.match(name))}


def gather(sources: Sequence[str], output: Path, *, force: bool = False) -> GatherResult:
    """Copy the recordings in ``sources`` (folders or URLs) into one folder, ``output``.

    A rank that restarted on another node after a failure is taken from its last attempt. ``force`` merges folders that
    do not look like one run's. Raises UnusableInput, naming folder and remedy, where they are not one run's, hold the
    same rank twice, or where ``output`` holds anything; PerfscopeError where it cannot be written.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UnusableInput(f"{output}: not an empty folder; choose another with --output, or remove it")
    with ExitStack() as stack:
        nodes = [_read(name, stack.enter_context(_opened(name))) for name in sources]
        runs = _latest(nodes)
        if not force:
            _check_one_run(nodes, runs)
        chosen = _choose(nodes, runs)
        try:
            return _write(output, chosen, _merged_launch(nodes), runs)
        except OSError as error:
            raise PerfscopeError(
                f"{error.filename or output}: cannot be written ({error.strerror}); free space there, or choose "
                "another place with --output"
            ) from error


@contextmanager
def _opened(name: str) -> Iterator[Path]:
    if remote.is_url(name):
        with remote.opened(name) as folder:
            yield folder
        return
    folder = Path(name)
    if not folder.exists() and (there := _ON_A_HOST.match(name)):
        raise UnusableInput(
            f"{name}: folders on other hosts are copied first: rsync -a {name.rstrip('/')}/ node-{there[1]}/, then "
            f"perfscope gather node-{there[1]} …"
        )
    if not folder.is_dir():
        raise UnusableInput(f"{name}: no such folder; name the folders that perfscope run wrote on each node")
    yield folder


def _read(name: str, folder: Path) -> _Node:
    files = {entry.name: entry for entry in folder.iterdir() if entry.is_file() and _belongs(entry.name)}
    runs = {}
    for entry in files.values():
        rank = paths.rank_of_run_file(entry)
        if rank is not None:
            with suppress(ValueError):  # left as it is: the analysis names the file and what is wrong with it
                runs[rank] = metadata.load_run(entry)
    launch_file = folder / paths.LAUNCH_FILE
    launch = None
    if launch_file.exists():
        with suppress(ValueError):
            launch = metadata.load_launch(launch_file)
    if not any(_OF_RANK.match(each) for each in files):
        raise UnusableInput(
            f"{name}: no rank recorded anything here. If this node has no ranks, leave the folder out; else see what "
            "perfscope run printed there"
        )
    return _Node(name, files, runs, launch)


def _belongs(name: str) -> bool:
    return name not in _LEFT_OUT and not name.startswith(".") and not name.endswith(paths.PARTIAL_SUFFIX)


def _latest(nodes: Sequence[_Node]) -> dict[int, tuple[_Node, RunMetadata]]:
    """Rank -> the node that ran its last attempt. Raises UnusableInput where two nodes claim the same."""
    latest: dict[int, tuple[_Node, RunMetadata]] = {}
    for node in nodes:
        for rank, run in sorted(node.runs.items()):
            other = latest.get(rank)
            if other is None or run.attempt > other[1].attempt:
                latest[rank] = node, run
            elif run.attempt == other[1].attempt:
                raise UnusableInput(
                    f"{node.name}: holds rank {rank}, and so does {other[0].name}. Folders of one run hold different "
                    "ranks each: leave out the one of another run, or, where every node numbered its ranks from 0, "
                    "start the launcher with each node's own rank (torchrun --node-rank, or --rdzv-backend)"
                )
    return latest


def _check_one_run(nodes: Sequence[_Node], runs: dict[int, tuple[_Node, RunMetadata]]) -> None:
    """Raise UnusableInput where folders are not of one run: another size, meeting point or time."""
    (first_node, first), *others = runs.values() or [(nodes[0], RunMetadata())]
    for node, run in others:
        differs = _difference(first, run)
        if differs is not None:
            what, theirs, ours = differs
            raise UnusableInput(
                f"{node.name}: {what} {theirs}, that of {first_node.name} {ours}. Leave out the folder of another run; "
                "if it is the same run, --force combines them"
            )


def _difference(first: RunMetadata, run: RunMetadata) -> tuple[str, str, str] | None:
    """(what, of this rank, of the first) where two ranks cannot be of one run."""
    if run.world_size != first.world_size:
        return "the number of ranks is", str(run.world_size), str(first.world_size)
    if run.attempt != first.attempt:
        return None  # a restarted rank meets the others anew, later
    if run.rendezvous and first.rendezvous and run.rendezvous != first.rendezvous:
        return "the ranks' rendezvous is", run.rendezvous, first.rendezvous
    apart = _seconds_between(first.started_at, run.started_at)
    if apart is not None and apart > SKEW_S:
        return "the time of the first step is", run.started_at, first.started_at
    return None


def _seconds_between(first: str, second: str) -> float | None:
    try:
        times = [datetime.fromisoformat(text) for text in (first, second)]
    except ValueError:
        return None
    times = [time if time.tzinfo else time.replace(tzinfo=timezone.utc) for time in times]
    return abs((times[1] - times[0]).total_seconds())


def _choose(nodes: Sequence[_Node], runs: dict[int, tuple[_Node, RunMetadata]]) -> list[tuple[str, list[Path]]]:
    """(name, files) of what the recording is to hold; several files under one name are put one after the other."""
    chosen: dict[str, list[tuple[_Node, Path]]] = {}
    for node in nodes:
        for name, path in sorted(node.files.items()):
            of_rank = _OF_RANK.match(name)
            latest = runs.get(int(of_rank[1])) if of_rank else None
            if latest is None or latest[0] is node:
                chosen.setdefault(name, []).append((node, path))
    for name, found in chosen.items():
        if len(found) > 1 and not paths.is_samples_file(found[0][1]):
            raise UnusableInput(
                f"{found[1][0].name}: holds {name}, and so does {found[0][0].name}. Folders of one run hold different "
                "files each: leave out the one of another run"
            )
    return [(name, [path for _, path in found]) for name, found in sorted(chosen.items())]


def _merged_launch(nodes: Sequence[_Node]) -> LaunchMetadata | None:
    """The first node's record with every node's own beside it; the exit code of the first that failed."""
    known = [(node, node.launch) for node in nodes if node.launch is not None]
    if not known:
        return None
    ordered = sorted(known, key=lambda pair: min(pair[0].ranks))
    codes = [launch.exit_code for _, launch in ordered]
    failed = next((code for code in codes if code), None)
    return replace(
        ordered[0][1],
        started_at=min(launch.started_at for _, launch in ordered),
        exit_code=failed if failed is not None else (None if None in codes else 0),
        ended=all(launch.has_ended for _, launch in ordered),
        ended_at=max(launch.ended_at for _, launch in ordered),
        nodes=tuple(
            NodeLaunch(
                host=launch.host,
                command=launch.command,
                started_at=launch.started_at,
                exit_code=launch.exit_code,
                ranks=tuple(sorted(node.ranks)),
            )
            for node, launch in ordered
        ),
    )


def _write(
    output: Path,
    chosen: Sequence[tuple[str, list[Path]]],
    launch: LaunchMetadata | None,
    runs: dict[int, tuple[_Node, RunMetadata]],
) -> GatherResult:
    output.mkdir(parents=True, exist_ok=True)
    total = 0
    written: list[Path] = []
    try:
        for name, sources in chosen:
            target = output / name
            written.append(paths.partial(target))
            with paths.partial(target).open("wb") as stream:
                for source in sources:
                    with source.open("rb") as reader:
                        shutil.copyfileobj(reader, stream, 8 << 20)
                total += stream.tell()
            written[-1] = paths.partial(target).replace(target)
        if launch is not None:
            metadata.save(launch, output / paths.LAUNCH_FILE)
    except BaseException:
        for path in written:
            path.unlink(missing_ok=True)
        raise
    ranks = {int(match[1]) for name, _ in chosen if (match := _OF_RANK.match(name))}
    world_size = max([run.world_size for _, run in runs.values()] + [max(ranks) + 1])
    missing = tuple(rank for rank in range(world_size) if rank not in ranks)
    return GatherResult(tuple(sorted(ranks)), missing, world_size, len(chosen), total)
