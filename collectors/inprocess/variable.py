"""Records where the variable PERFSCOPE asks for it, in programs that nobody can wrap or change.

``perfscope.pth`` lies beside the installed package and imports this module at every start of Python, if PERFSCOPE is
set. It therefore imports next to nothing, and waits as the bootstrap of ``perfscope run`` does: until torch has been
imported, and then until the process trains, which launchers and loader workers never do.
"""

from __future__ import annotations

import os
import sys

from perfscope.collectors.launch import bootstrap

OFF = ("", "0", "off", "no", "false")
"""Values that ask for nothing."""

MODULE = "_perfscope_variable"
"""Name by which ``perfscope.step()`` finds this module (``session.VARIABLE_MODULE``)."""


_waiting: list[bool] = []
"""Not empty while a training is waited for."""


def begin() -> None:
    """Wait for a training, where one is to be recorded. Called at the start of Python."""
    if os.environ.get(bootstrap.VARIABLE, "").strip().lower() in OFF or MODULE in sys.modules:
        return
    sys.modules[MODULE] = sys.modules[__name__]
    _waiting.append(True)
    if "torch" in sys.modules:
        _torch_imported()
    else:
        sys.meta_path.insert(0, bootstrap.Watch({"torch": _torch_imported}, lambda call: call()))


def attach_waiting() -> None:
    """This process trains: record it. Further calls do nothing."""
    if not _waiting:
        return
    _waiting.clear()
    try:
        from perfscope.collectors.inprocess import options, program

        if bootstrap.MODULE_NAME in sys.modules:
            return  # perfscope run records it
        folder, asked = options.parse(os.environ.get(bootstrap.VARIABLE, ""))
        program.start_for_variable(folder, asked)
    except Exception as error:
        sys.stderr.write(f"perfscope: nothing is recorded: {bootstrap.VARIABLE}: {error}\n")


def _torch_imported() -> None:
    try:
        bootstrap.wait_for_fetchers(_time_fetches)
        bootstrap.wait_for_training(attach_waiting)
    except Exception:
        attach_waiting()  # a torch that is made otherwise; what is wrong with it is reported there


def _time_fetches() -> None:
    try:
        from perfscope.collectors.phases.fetching import time_fetches

        time_fetches("")
    except Exception:  # a worker that counts nothing
        return
