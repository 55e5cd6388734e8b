"""Gets the collector into every Python process of a profiled command.

``perfscope run`` copies this file into the recording as ``.bootstrap/sitecustomize.py`` and puts that folder first on
``PYTHONPATH``, so Python runs it at every start: in ranks, launchers and data loader workers alike. It therefore costs
next to nothing (no import beyond what the interpreter has loaded, a file looked for) and starts nothing. It waits until
``torch`` is imported, and then until the process makes its first optimizer or has run some backward passes without one,
which launchers and workers never do: only then is the collector imported. Loader workers count what they fetch, from
their first batch on. Standard library only, in a syntax that old interpreters read as well; it may fail, but never in a
way that the profiled command notices. Configuration lies in a file beside it, because some launchers pass few
environment variables on.
"""

# pathlib is too dear to import at every start, and old interpreters shall get as far as saying that they are:
# ruff: noqa: PTH100, PTH110, PTH118, PTH120, PTH123, UP031, UP036
from __future__ import annotations

import _thread
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

FOLDER = os.path.dirname(os.path.abspath(__file__))

WATCHED = {
    "torch": "attach_torch",
    "deepspeed.runtime.engine": "attach_deepspeed",
    "megatron.core.optimizer.optimizer": "attach_megatron",
    "horovod.torch.functions": "attach_horovod",
}
"""Module -> the function of ``perfscope.collectors.capture.attach`` to call once it has been imported."""

LAUNCHER = "torch.distributed.launcher.api"
"""Module of torchrun and of others that launch as it does."""

NOTE_FAILED = "note_failed_ranks"
"""Function of ``perfscope.collectors.launch.failed`` to call where an exception ends such a launcher."""

VARIABLE = "PERFSCOPE"
"""Asks for a recording where nothing can be wrapped (``perfscope.collectors.inprocess.variable``)."""

OVERRIDES_FILE = "overrides.json"
"""Beside this file only where ``perfscope tune`` tries settings (``perfscope.collectors.overrides.overrides``)."""

HANGS_FILE = "hangs"
"""Beside this file only where ranks that make no step are to be noticed (``perfscope.collectors.hang``)."""

OVERRIDING = {"attach_torch": "apply_torch", "attach_deepspeed": "apply_deepspeed"}
"""What :data:`WATCHED` calls -> what of that module is called before it then, at once: scripts make loaders before
optimizers.
"""


BACKWARDS = 4
"""Backward passes after which a process trains that has made no optimizer. Whoever only asks for gradients now and then
(a test, an explanation) takes fewer.
"""

RUN_BACKWARD = "_engine_run_backward"
"""Function of ``torch.autograd`` through which ``backward()`` and ``grad()`` reach the engine."""

_NO_TASK = -1
"""``NO_TASK`` of ``perfscope.collectors.phases``: nothing of that is imported here."""


class Watch:
    """A meta-path finder that calls back when a module of interest has been imported, and is otherwise not there.

    A module that is only looked for (``importlib.util.find_spec("torch")``, as many libraries do before they import it)
    is still waited for.
    """

    def __init__(self, waiting: dict[str, Any], then: Callable[[Any], None]) -> None:
        self.waiting = dict(waiting)
        """Module -> what ``then`` is called with."""
        self.then = then
        self._searching: set[tuple[str, int]] = set()
        """Modules for which others are being asked, and by which thread: another ``Watch`` among them asks this one."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Find a watched module by asking the other finders; any other name is none of our business."""
        search = name, _thread.get_ident()
        if name not in self.waiting or search in self._searching:
            return None
        self._searching.add(search)
        try:
            return self._spec(name, path, target)
        finally:
            self._searching.discard(search)

    def _spec(self, name: str, path: Any, target: Any) -> ModuleSpec | None:
        """What the other finders know of a module, with a loader that calls back."""
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                if spec.loader is not None:
                    loader: Any = CallingLoader(spec.loader, lambda: self.imported(name))
                    spec.loader = loader
                return spec
        return None

    def imported(self, name: str) -> None:
        """Call back for a module, once."""
        callback = self.waiting.pop(name, None)
        if callback is not None:
            self.then(callback)


class CallingLoader:
    """Stands in for a module's loader until the module has been executed once, then calls back."""

    def __init__(self, loader: Any, then: Callable[[], None]) -> None:
        self.loader = loader
        self.then = then

    def __getattr__(self, name: str) -> Any:
        """Answer whoever asks the loader of a module that is not imported yet (``get_filename``, ``get_code``)."""
        if name == "loader":  # of a copy that is being made
            raise AttributeError(name)
        return getattr(self.loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """As the module's own loader does."""
        module: ModuleType | None = self.loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its own loader back, execute it, call back."""
        module.__loader__ = self.loader
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        self.loader.exec_module(module)
        self.then()


WAITING: list[str] = []
"""What to call of ``perfscope.collectors.capture.attach`` once this process trains: modules imported so far."""

MODULE_NAME = "_perfscope_bootstrap"
"""Name by which ``perfscope.step()`` finds this module: the name it runs under may become the user's own."""


def imported(callback: str) -> None:
    """A watched module has been imported. Torch always comes first, because the others import it."""
    if callback in OVERRIDING and os.path.exists(os.path.join(FOLDER, OVERRIDES_FILE)):
        attach(OVERRIDING[callback], "perfscope.collectors.overrides.overrides")
    if callback == WATCHED["torch"]:
        mark("torch")
        if os.path.exists(os.path.join(FOLDER, HANGS_FILE)):
            attach("prepare", "perfscope.collectors.hang.prepare")
        WAITING.append(callback)
        wait_for_fetchers()
        try:
            wait_for_training()
        except Exception:
            attach_waiting()  # a torch that is made otherwise; what is wrong with it is reported there
    elif callback == NOTE_FAILED:
        note_failed_at_end()
    elif WAITING:
        WAITING.append(callback)
    else:
        attach(callback)


def note_failed_at_end() -> None:
    """This process launches ranks: where an exception ends it, note how they ended."""
    import atexit

    def ends() -> None:
        if getattr(sys, "last_value", None) is not None:
            attach(NOTE_FAILED, "perfscope.collectors.launch.failed")

    atexit.register(ends)


def wait_for_training(then: Callable[[], None] | None = None) -> None:
    """Have the first optimizer that is made attach the collector, or call ``then``: it looks up a function of its base
    class for that. Some backward passes without any optimizer do the same.
    """
    optimizer = sys.modules["torch"].optim.Optimizer
    original = vars(optimizer)["profile_hook_step"]
    wait_no_more = wait_for_backwards(attach_without_optimizer if then is None else lambda _passes: then())

    def profile_hook_step(step: Callable[..., Any]) -> Callable[..., Any]:
        wait_no_more()
        if vars(optimizer)["profile_hook_step"] is not replacement:  # replaced by somebody who calls this one
            (then or attach_waiting)()
            plain: Callable[..., Any] = original.__func__(step)
            return plain
        optimizer.profile_hook_step = original
        (then or attach_waiting)()
        hooked: Callable[..., Any] = optimizer.profile_hook_step(step)
        return hooked

    replacement = staticmethod(profile_hook_step)
    optimizer.profile_hook_step = replacement


def wait_for_backwards(then: Callable[[list[bool]], None]) -> Callable[[], None]:
    """Have the end of the outermost backward pass number :data:`BACKWARDS` call ``then`` with whether each has written
    ``.grad``. Returns what waits no more.
    """
    torch: Any = sys.modules["torch"]
    autograd = torch.autograd
    original = getattr(autograd, RUN_BACKWARD, None)
    passes: list[bool] = []
    if original is None:
        return lambda: None

    def run_backward(*args: Any, **kwargs: Any) -> Any:
        outermost = torch._C._current_graph_task_id() == _NO_TASK
        result = original(*args, **kwargs)
        if outermost and len(passes) < BACKWARDS:
            passes.append(bool(kwargs.get("accumulate_grad")))
            if len(passes) == BACKWARDS:
                wait_no_more()
                then(passes)
        return result

    def wait_no_more() -> None:
        if getattr(autograd, RUN_BACKWARD, None) is run_backward:
            setattr(autograd, RUN_BACKWARD, original)

    setattr(autograd, RUN_BACKWARD, run_backward)
    return wait_no_more


def wait_for_fetchers(then: Callable[[], None] | None = None) -> None:
    """Have the first fetcher that is made in a data loader's worker, however that was started, count what it fetches
    (``then`` prepares that where this is no copy in a recording). Here and not in the collector: what workers inherit
    is there from the beginning, and iterators precede optimizers.
    """
    data: Any = sys.modules.get("torch.utils.data")
    kind: Any = getattr(data, "_DatasetKind", None)
    original = getattr(kind, "create_fetcher", None)
    if original is None:
        return  # a torch that loads data otherwise: what its workers take is not known

    def create_fetcher(*args: Any, **kwargs: Any) -> Any:
        if data.get_worker_info() is None:
            return original(*args, **kwargs)
        kind.create_fetcher = staticmethod(original)
        if then is not None:
            then()
        else:
            attach("time_fetches", "perfscope.collectors.phases.fetching")
        return kind.create_fetcher(*args, **kwargs)

    kind.create_fetcher = staticmethod(create_fetcher)


def attach_waiting() -> None:
    """This process trains: attach to every module that has been imported so far."""
    waiting = list(WAITING)
    del WAITING[:]
    for callback in waiting:
        attach(callback)


def attach_without_optimizer(passes: list[bool]) -> None:
    """This process trains without an optimizer of torch's: its backward passes are its steps."""
    attach_waiting()
    attach("attach_backwards", arguments=(passes,))


def attach(callback: str, module: str = "perfscope.collectors.capture.attach", arguments: tuple[Any, ...] = ()) -> None:
    """Hand over to a function of ``module``; a failure goes to a file that ``perfscope run`` reads."""
    try:
        if sys.version_info < (3, 10):
            return note_failure("Python %d.%d is too old for the collector, which needs 3.10" % sys.version_info[:2])
        import importlib
        import json

        with open(os.path.join(FOLDER, "config.json"), encoding="utf-8") as file:
            config = json.load(file)
        import_perfscope(config["package_root"])
        getattr(importlib.import_module(module), callback)(FOLDER, *arguments)
    except Exception as error:
        note_failure("%s: %s" % (type(error).__name__, error))
    return None


def import_perfscope(root: str) -> None:
    """Import the ``perfscope`` package that lies in ``root``, whatever ``sys.path`` holds; ``sys.path`` stays as it is.

    An unrelated project has the same name on PyPI, so looking along ``sys.path`` could find the wrong one.
    """
    package = sys.modules.get("perfscope")
    if package is None:
        import importlib.util
        from importlib.machinery import PathFinder

        spec = PathFinder.find_spec("perfscope", [root])
        if spec is None or spec.loader is None:
            raise ImportError("no package 'perfscope' in " + root)
        package = importlib.util.module_from_spec(spec)
        sys.modules["perfscope"] = package
        spec.loader.exec_module(package)
    elif not str(package.__file__).startswith(root):
        raise ImportError("another package named 'perfscope' is in use: %s" % package.__file__)


def change_environment() -> None:
    """Set the variables that ``perfscope tune`` tries, before any library reads them."""
    path = os.path.join(FOLDER, OVERRIDES_FILE)
    if not os.path.exists(path):
        return
    try:
        import json

        with open(path, encoding="utf-8") as file:
            environment = json.load(file)["environment"]
        for name, value in environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
    except Exception as error:
        note_failure("%s: %s" % (type(error).__name__, error))


def note_failure(failure: str) -> None:
    """Leave a line for ``perfscope run`` to show."""
    try:
        with open(os.path.join(FOLDER, "failures.txt"), "a", encoding="utf-8") as file:
            file.write(" ".join(failure.split()) + "\n")
    except OSError:
        pass


def mark(what: str) -> None:
    """Leave an empty file that shows how far the bootstrap came in any process."""
    path = os.path.join(FOLDER, "seen-" + what)
    try:
        if not os.path.exists(path):
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY))
    except OSError:
        pass


def run_the_users_own() -> None:
    """Run the ``sitecustomize`` that Python would have found without us; its errors are reported as Python does."""
    import importlib.util
    from importlib.machinery import PathFinder

    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


def main() -> None:
    """Watch for torch, take our folder off ``sys.path`` (``PYTHONPATH`` keeps it for children), run the user's own."""
    mark("python")
    change_environment()
    sys.modules[MODULE_NAME] = sys.modules[__name__]
    if "torch" in sys.modules:
        imported(WATCHED["torch"])
    waiting = {name: call for name, call in {**WATCHED, LAUNCHER: NOTE_FAILED}.items() if name not in sys.modules}
    sys.meta_path.insert(0, Watch(waiting, imported))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or os.curdir) != FOLDER]
    run_the_users_own()


if __name__ == "sitecustomize":
    main()
