"""The rank's side of the system sampler: the first recorded rank of a host starts one process, which samples it.

The training process samples nothing: it starts a small process, notifies it when recorded steps begin and end,
so that it looks at these very moments, and when to stop. That process keeps no file and no port of its parent open, and
ends by itself within a second of the parent's end, however that came.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from perfscope.collectors.claims import claim_host
from perfscope.collectors.config import CollectorConfig
from perfscope.collectors.identity import Identity, attempt
from perfscope.recording.paths import BOOTSTRAP_FOLDER

QUIT: Final = b"q"
LOOK: Final = b"l"

_END_S: Final = 1.0
"""Time that a sampler is given for its last sample."""

_DROPPED: Final = ("LD_PRELOAD", "CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH", "PERFSCOPE")
"""Variables by which profilers get into every process: this one is not to be profiled."""

_MAIN: Final = (
    "import sys; sys.path[:] = [sys.argv[1], *(entry for entry in sys.path if entry)]; "
    "from perfscope.collectors.sampler.process import main; main(sys.argv[2])"
)


@dataclass(frozen=True, kw_only=True)
class SamplerOptions:
    """What a sampler has to know."""

    folder: str
    """The recording's, absolute."""
    period_s: float
    parent: int
    """The process with which the sampler ends."""
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int

    def to_json(self) -> str:
        """As it travels on a command line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> SamplerOptions:
        """Read what ``to_json`` wrote."""
        return cls(**json.loads(text))


def start_sampler(config: CollectorConfig, identity: Identity) -> HostSampler | None:
    """Have this host sampled; None where it is already, or is not to be. Raises OSError."""
    if not config.sample_every:
        return None
    options = SamplerOptions(
        folder=config.output,
        period_s=config.sample_every,
        parent=os.getpid(),
        rank=identity.rank,
        local_rank=identity.local_rank,
        world_size=identity.world_size,
        local_world_size=identity.local_world_size,
    )
    return HostSampler.start(options, attempt(), config.package_root)


class HostSampler:
    """A running sampler, as its parent sees it."""

    def __init__(self, pid: int, pipe: int) -> None:
        self._pid = pid
        self._pipe = pipe
        self._pipe_is = _identity(pipe)

    @classmethod
    def start(cls, options: SamplerOptions, restarts: int, package_root: str) -> HostSampler | None:
        """Start a sampler; None where another process has this host sampled already. Raises OSError."""
        if claim_host(Path(options.folder), restarts) is not None:
            return None
        theirs, ours = os.pipe()
        try:
            # Not subprocess: that waits for an answer on a pipe, which a process forked meanwhile would keep open.
            pid = os.posix_spawn(
                sys.executable,
                [sys.executable, "-c", _MAIN, package_root, options.to_json()],
                _environment(os.environ, Path(options.folder)),
                file_actions=[
                    (os.POSIX_SPAWN_DUP2, theirs, 0),
                    (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
                    (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
                ],
                setsigmask=(),
            )
        except OSError:
            os.close(ours)
            raise
        finally:
            os.close(theirs)
        return cls(pid, ours)

    def look(self) -> None:
        """Recorded steps begin or end: have it take a sample now, and go on at the full rate."""
        self._tell(LOOK)

    def stop(self) -> None:
        """Have it take a last sample and end. Further calls do nothing."""
        if self._tell(QUIT):
            os.close(self._pipe)
        self._pipe = -1
        if not self._ends():
            with suppress(OSError):
                os.kill(self._pid, signal.SIGKILL)
            self._ends()  # a driver may keep it even then: not worth keeping the training's end for

    def _tell(self, word: bytes) -> bool:
        """Write to the sampler; False where the pipe is not ours any more: a script may close any file."""
        if self._pipe < 0 or _identity(self._pipe) != self._pipe_is:
            return False
        with suppress(OSError):  # it has ended already
            os.write(self._pipe, word)
        return True

    def _ends(self) -> bool:
        deadline = time.monotonic() + _END_S
        while time.monotonic() < deadline:
            try:
                if os.waitpid(self._pid, os.WNOHANG)[0]:
                    return True
            except ChildProcessError:  # the script has waited for all its children, this one included
                return True
            time.sleep(0.002)
        return False


def _environment(environment: Mapping[str, str], folder: Path) -> dict[str, str]:
    """The rank's environment without what would make the sampler a rank or have it profiled."""
    variables = {name: value for name, value in environment.items() if name not in _DROPPED}
    bootstrap = str(folder / BOOTSTRAP_FOLDER)
    paths = [entry for entry in variables.get("PYTHONPATH", "").split(os.pathsep) if entry and entry != bootstrap]
    variables["PYTHONPATH"] = os.pathsep.join(paths)
    return variables


def _identity(descriptor: int) -> tuple[int, int] | None:
    try:
        status = os.fstat(descriptor)
    except OSError:
        return None
    return status.st_dev, status.st_ino
