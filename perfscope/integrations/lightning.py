"""PerfScope as a callback or a profiler of Lightning's Trainer, under either name of the package."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

import perfscope

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from perfscope.collectors.inprocess.options import Options

if "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
    from pytorch_lightning.callbacks import Callback
    from pytorch_lightning.profilers import Profiler
else:
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.profilers import Profiler


class PerfScopeCallback(Callback):
    """Records ``trainer.fit()``: ``Trainer(callbacks=[PerfScopeCallback("recording", wait=10)])``.

    Takes what :class:`perfscope.record` takes. Steps are those of the optimizer, counted from where this ``fit()``
    begins.
    """

    def __init__(self, output: str | os.PathLike[str] | None = None, **options: Unpack[Options]) -> None:
        self.recording = perfscope.record(output, **options)
        """What records; its ``folder`` is the recording's."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """The training begins, after the sanity check of the validation: record from here."""
        self.recording.start()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """The last step is over: write the recording."""
        self.recording.stop()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """The training fails: write what there is."""
        self.recording.__exit__(type(exception), exception, None)


class PerfScopeProfiler(Profiler):
    """Records ``trainer.fit()``, with Lightning's own actions as ranges: ``Trainer(profiler=PerfScopeProfiler())``.

    Takes what :class:`perfscope.record` takes. The actions (``[Strategy]DDPStrategy.training_step`` and the like) are
    in the traces where a capture runs, and nowhere else.
    """

    def __init__(self, output: str | os.PathLike[str] | None = None, **options: Unpack[Options]) -> None:
        super().__init__()
        self.recording = perfscope.record(output, **options)
        """What records; its ``folder`` is the recording's."""
        self._open: dict[str, Any] = {}

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        """Record, where this is a training."""
        super().setup(stage, local_rank, log_dir)
        if stage == "fit":
            self.recording.start()

    def start(self, action_name: str) -> None:
        """An action begins."""
        from torch import autograd, profiler

        if autograd._profiler_enabled():  # type: ignore[attr-defined]
            self._open[action_name] = profiler.record_function(action_name)
            self._open[action_name].__enter__()

    def stop(self, action_name: str) -> None:
        """It has ended."""
        action = self._open.pop(action_name, None)
        if action is not None:
            action.__exit__(None, None, None)

    def summary(self) -> str:
        """Where the recording lies, for the report that Lightning logs at the end."""
        folder = self.recording.stop()
        return f"PerfScope: perfscope analyze {folder}" if folder is not None else "PerfScope recorded nothing"

    def teardown(self, stage: str | None) -> None:
        """The training is over: write the recording."""
        self.recording.stop()
        super().teardown(stage)
