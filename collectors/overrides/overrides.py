"""Applies settings that ``perfscope tune`` tries, from outside: the script's calls are answered with other values.

Off unless the bootstrap folder holds :data:`OVERRIDES_FILE`, which ``perfscope tune`` alone writes. Environment
variables are set by the bootstrap itself, before torch reads them. Whatever cannot be applied is left as the script has
it and noted in the log; a training never fails because of that.
"""

from __future__ import annotations

import atexit
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from perfscope.collectors.overrides.log import LOG, Log
from perfscope.collectors.patches import Patches

OVERRIDES_FILE: Final = "overrides.json"
"""In the bootstrap folder; the bootstrap, which imports nothing, spells it out again."""

DATALOADER: Final = "dataloader."
DDP: Final = "ddp."
DEEPSPEED: Final = "deepspeed."


@dataclass(frozen=True, kw_only=True)
class Overrides:
    """What is to be applied in every rank."""

    settings: dict[str, Any] = field(default_factory=dict)
    """``dataloader.*`` and ``ddp.*`` by the argument's name, ``ddp.no_sync``, ``ddp.comm_dtype``, and ``deepspeed.``
    followed by the path in its JSON: ``deepspeed.zero_optimization.overlap_comm``."""
    environment: dict[str, str | None] = field(default_factory=dict)
    """Variables to set; None: to take away."""
    datasets: tuple[str, ...] = ()
    """Classes of the datasets whose loaders are meant; empty: every loader."""
    microbatches: int = 1
    """Backwards per step, for ``ddp.no_sync``."""

    def of(self, prefix: str) -> dict[str, Any]:
        """The settings that begin so, without it."""
        return {name.removeprefix(prefix): value for name, value in self.settings.items() if name.startswith(prefix)}

    def save(self, folder: Path) -> None:
        """Write them into the bootstrap folder. Raises OSError."""
        (folder / OVERRIDES_FILE).write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> Overrides:
        """Read them from the bootstrap folder. Raises OSError or ValueError."""
        values = json.loads((folder / OVERRIDES_FILE).read_text(encoding="utf-8"))
        return cls(**{**values, "datasets": tuple(values["datasets"])})


def install_torch(overrides: Overrides, patches: Patches, log: Log) -> None:
    """Torch has been imported: answer the calls that make loaders and DDP."""
    for name in overrides.environment:
        log.replaced(f"env.{name}", None, overrides.environment[name])
    if loader := overrides.of(DATALOADER):
        from perfscope.collectors.overrides.loader import override_loaders

        override_loaders(loader, overrides.datasets, patches, log)
    if ddp := overrides.of(DDP):
        from perfscope.collectors.overrides.ddp import override_ddp

        override_ddp(ddp, overrides.microbatches, patches, log)


def install_deepspeed(overrides: Overrides, patches: Patches, log: Log) -> None:
    """DeepSpeed has been imported: its configurations are read with other values in them."""
    if values := overrides.of(DEEPSPEED):
        from perfscope.collectors.overrides.deepspeed import override_deepspeed

        override_deepspeed(values, patches, log)


_patches: Final = Patches()
"""This process's; undone at its end."""


def apply_torch(folder: str) -> None:
    """Called by the bootstrap. Raises where the file cannot be read or torch differs; the bootstrap notes it."""
    atexit.register(_patches.restore)
    install_torch(Overrides.load(Path(folder)), _patches, LOG)


def apply_deepspeed(folder: str) -> None:
    """As :func:`apply_torch`."""
    install_deepspeed(Overrides.load(Path(folder)), _patches, LOG)
