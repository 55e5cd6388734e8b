"""What pyproject.toml cannot say: the description on PyPI, and perfscope.pth beside the package.

The description is the README with absolute links, since PyPI has no files for relative ones to lead to. Python runs the
line in perfscope.pth at every start: where the variable PERFSCOPE asks for a recording, it loads the hook
(perfscope.collectors.inprocess.variable), and otherwise does nothing. Launchers that cannot be wrapped need it.
"""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.editable_wheel import editable_wheel

REPOSITORY = "https://github.com/perfscope/perfscope"
LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?!https?:|#)(?P<target>[^)]+)\)")


def absolute(link: re.Match[str]) -> str:
    """A relative link of the README as one to the repository: pictures to the raw file, others to its page."""
    kind = "raw" if link["image"] else "blob"
    return f"{link['image']}[{link['text']}]({REPOSITORY}/{kind}/main/{link['target']})"


NAME = "perfscope.pth"
LINE = (
    "import os; os.environ.get('PERFSCOPE') "
    "and __import__('perfscope.collectors.inprocess.variable', fromlist=['begin']).begin()\n"
)


class BuildWithHook(build_py):
    """Adds the file to what is built."""

    def run(self) -> None:
        """Build the packages, then write the file beside them."""
        super().run()
        if not self.editable_mode:
            path = Path(self.build_lib) / NAME
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(LINE, encoding="utf-8")

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        """The packages' files, and this one."""
        return [*super().get_outputs(include_bytecode), str(Path(self.build_lib) / NAME)]


class EditableWithHook(editable_wheel):
    """Adds the file to an editable installation, too."""

    def _run_build_commands(self, dist_name: str, unpacked: str, *folders: str) -> tuple[list[str], dict[str, str]]:
        (Path(unpacked) / NAME).write_text(LINE, encoding="utf-8")
        built: tuple[list[str], dict[str, str]] = super()._run_build_commands(dist_name, unpacked, *folders)
        return built


readme = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")
setup(
    long_description=LINK.sub(absolute, readme),
    long_description_content_type="text/markdown",
    cmdclass={"build_py": BuildWithHook, "editable_wheel": EditableWithHook},
)
