"""PerfScope as a callback of the transformers Trainer, and of the trainers made from it (TRL's, for example)."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

import perfscope

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from perfscope.collectors.inprocess.options import Options


class PerfScopeCallback(TrainerCallback):
    """Records ``trainer.train()``: ``Trainer(..., callbacks=[PerfScopeCallback("recording", wait=10)])``.

    Takes what :class:`perfscope.record` takes. Steps are those of the optimizer, as in ``state.global_step``, counted
    from where this ``train()`` begins.
    """

    def __init__(self, output: str | os.PathLike[str] | None = None, **options: Unpack[Options]) -> None:
        self.recording = perfscope.record(output, **options)
        """What records; its ``folder`` is the recording's."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The Trainer has prepared model and optimizer: record from here."""
        self.recording.start()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The last step is over: write the recording."""
        self.recording.stop()
