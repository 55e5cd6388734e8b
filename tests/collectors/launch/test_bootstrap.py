"""The bootstrap folder on ``PYTHONPATH``: it starts the collector when torch is imported, and changes nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import perfscope
from perfscope.collectors.config import CollectorConfig
from perfscope.collectors.launch.folder import package_root
from perfscope.collectors.launch.run import Launch, child_environment, isolated_python
from perfscope.recording.paths import BOOTSTRAP_FOLDER


@pytest.fixture
def bootstrap(tmp_path: Path) -> Path:
    config = CollectorConfig(output=str(tmp_path / "r"), package_root=package_root())
    Launch(config, ["python"]).prepare()
    return tmp_path / "r" / BOOTSTRAP_FOLDER


def python(bootstrap: Path, code: str, *more: Path, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Run code in a Python that starts with the bootstrap; ``more`` comes after it on ``PYTHONPATH``."""
    path = os.pathsep.join(map(str, more))
    environment = child_environment({**os.environ, "PYTHONPATH": path}, bootstrap)
    command = [sys.executable, *options, "-c", code]
    folder = bootstrap.parent.parent  # not the repository, where perfscope would be found by its folder
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)


def fake_torch(folder: Path, content: str = "") -> Path:
    """A package called torch that is imported in no time, and whose loader can be looked at."""
    (folder / "site" / "torch").mkdir(parents=True)
    (folder / "site" / "torch" / "__init__.py").write_text(content)
    return folder / "site"


def test_it_comes_first_and_keeps_what_was_there(tmp_path: Path) -> None:
    assert child_environment({"A": "1"}, tmp_path) == {"A": "1", "PYTHONPATH": str(tmp_path)}
    assert child_environment({"PYTHONPATH": "x:y"}, tmp_path)["PYTHONPATH"] == f"{tmp_path}{os.pathsep}x:y"


def test_a_process_without_torch_notices_nothing(bootstrap: Path) -> None:
    done = python(bootstrap, "import sys; print([m for m in sys.modules if m.startswith('perfscope')], sys.path)")
    assert done.stderr == ""
    assert done.stdout.startswith("[] ")
    assert str(bootstrap) not in done.stdout
    assert {path.name for path in bootstrap.glob("seen-*")} == {"seen-python"}


def test_the_users_own_sitecustomize_is_the_one_that_is_imported(bootstrap: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('theirs'); VALUE = 7")
    done = python(bootstrap, "import sitecustomize; print(sitecustomize.VALUE, sitecustomize.__file__)", tmp_path)
    assert done.stdout.splitlines() == ["theirs", f"7 {tmp_path / 'sitecustomize.py'}"]


def test_an_error_in_the_users_own_is_reported_as_python_does(bootstrap: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("1 / 0")
    done = python(bootstrap, "print('goes on')", tmp_path)
    assert done.stdout == "goes on\n"
    assert "Error in sitecustomize" in done.stderr
    assert "ZeroDivisionError" in done.stderr


def test_a_failing_collector_leaves_the_import_alone_and_a_line_behind(bootstrap: Path, tmp_path: Path) -> None:
    site = fake_torch(tmp_path, "VALUE = 3")
    done = python(bootstrap, "import torch; print(torch.VALUE)", site)
    assert (done.stdout, done.stderr) == ("3\n", "")
    assert "AttributeError" in (bootstrap / "failures.txt").read_text()
    assert (bootstrap / "seen-torch").exists()


def test_the_loader_is_the_modules_own_again(bootstrap: Path, tmp_path: Path) -> None:
    site = fake_torch(tmp_path)
    code = "import torch; print(type(torch.__loader__).__name__, torch.__spec__.loader is torch.__loader__)"
    assert python(bootstrap, code, site).stdout == "SourceFileLoader True\n"


@pytest.mark.parametrize(
    "before",
    [
        "import importlib.util; importlib.util.find_spec('torch')",
        # What transformers and datasets do: they look whether torch is installed, and import it later.
        "import importlib.util; importlib.util.find_spec('torch'); importlib.util.find_spec('torch')",
        "import importlib.metadata, pkgutil; pkgutil.find_loader('torch') if hasattr(pkgutil, 'find_loader') else None",
    ],
)
def test_a_program_that_looks_for_torch_before_it_imports_it(bootstrap: Path, tmp_path: Path, before: str) -> None:
    site = fake_torch(tmp_path)
    python(bootstrap, before, site)
    assert not (bootstrap / "seen-torch").exists(), "it was not imported"
    done = python(bootstrap, f"import warnings; warnings.simplefilter('ignore'); {before}; import torch", site)
    assert (done.stdout, done.stderr) == ("", "")
    assert (bootstrap / "seen-torch").exists()


def test_a_finder_that_asks_all_finders_is_no_endless_search(bootstrap: Path, tmp_path: Path) -> None:
    site = fake_torch(tmp_path)
    code = """
import importlib.util, sys

class Hook:  # as wrapt's: it finds a module by asking all finders, itself left out
    searching = False

    def find_spec(self, name, path=None, target=None):
        if name != "torch" or self.searching:
            return None
        self.searching = True
        try:
            return importlib.util.find_spec(name)
        finally:
            self.searching = False

sys.meta_path.insert(int(sys.argv[1]) if len(sys.argv) > 1 else 0, Hook())
import torch
print(type(torch.__loader__).__name__)
"""
    for place in (0, 1):
        done = python(bootstrap, code.replace("int(sys.argv[1]) if len(sys.argv) > 1 else 0", str(place)), site)
        assert (done.stdout, done.stderr) == ("SourceFileLoader\n", "")
        assert (bootstrap / "seen-torch").exists()
        (bootstrap / "seen-torch").unlink()


def test_an_import_error_stays_what_it_is(bootstrap: Path, tmp_path: Path) -> None:
    site = fake_torch(tmp_path, "raise ImportError('broken torch')")
    done = python(bootstrap, "import torch", site)
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("ImportError: broken torch")


LOOKING = {
    "find_spec": "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations != [])",
    "its loader": "import importlib.util as u; s = u.find_spec('torch'); print(s.loader.get_filename() == s.origin)",
    "a copy": "import copy, importlib.util as u; print(copy.copy(u.find_spec('torch').loader).is_package('torch'))",
    "its code": "import importlib.util as u; print(u.find_spec('torch').loader.get_code('torch') is not None)",
    "a failed import": (
        "import os; os.environ['BROKEN'] = '1'\n"
        "try: import torch\nexcept ImportError: print(True); del os.environ['BROKEN']"
    ),
}
"""What libraries do to find out whether torch is there, before anybody imports it."""


@pytest.mark.parametrize("looking", LOOKING)
def test_looking_for_torch_before_it_is_imported_does_not_hide_the_import(
    bootstrap: Path, tmp_path: Path, looking: str
) -> None:
    site = fake_torch(tmp_path, "import os\nif 'BROKEN' in os.environ: raise ImportError")
    done = python(bootstrap, LOOKING[looking] + "\nimport torch, sys; sys.modules.pop('torch'); import torch", site)
    assert (done.stdout, done.stderr) == ("True\n", "")
    assert (bootstrap / "seen-torch").exists()
    assert len((bootstrap / "failures.txt").read_text().splitlines()) == 1  # the fake has no optimizers: told once


def test_two_that_wait_for_a_module_are_both_called_back(bootstrap: Path, tmp_path: Path) -> None:
    code = (
        "import sys, importlib.util as u; from _perfscope_bootstrap import Watch\n"
        "for n in (1, 2): sys.meta_path.insert(0, Watch({'late': n}, print))\n"
        "u.find_spec('late'); import late"
    )
    (tmp_path / "late.py").touch()
    done = python(bootstrap, code, tmp_path)
    assert (sorted(done.stdout.split()), done.stderr) == (["1", "2"], "")


def test_another_package_of_the_same_name_is_not_mistaken_for_ours(bootstrap: Path, tmp_path: Path) -> None:
    site = fake_torch(tmp_path)
    (site / "perfscope").mkdir()
    (site / "perfscope" / "__init__.py").write_text("OTHER = True")
    done = python(bootstrap, "import perfscope; import torch; print(perfscope.OTHER)", site)
    assert done.stdout == "True\n"
    assert "another package named 'perfscope'" in (bootstrap / "failures.txt").read_text()
    ours = python(bootstrap, "import torch, perfscope; print(perfscope.__file__)", site)
    assert ours.stdout.strip() == str(Path(perfscope.__file__).resolve())


def test_sys_path_needs_not_lead_to_the_package(bootstrap: Path, tmp_path: Path) -> None:
    site = fake_torch(tmp_path)
    code = "import sys; before = list(sys.path); import torch; print('perfscope' in sys.modules, sys.path == before)"
    assert python(bootstrap, code, site, options=("-s",)).stdout == "True True\n"


def test_step_does_nothing_outside_a_run() -> None:
    assert perfscope.step() is None


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("python -I train.py", "-I"),
        ("torchrun --no-python python3.11 -uE train.py", "-uE"),
        ("python -u -S -m train", "-S"),
        ("python -u train.py -E", None),
        ("python -m train -I", None),
        ("python -c code -S", None),
        ("torchrun train.py -E", None),
        ("python", None),
    ],
)
def test_isolated_interpreters_are_noticed(command: str, option: str | None) -> None:
    assert isolated_python(command.split()) == option
