"""Compares the wheel built from the sdist with the one from the tree: same files, same bytes; no link in the sdist.

What a compiler makes has the build's folder in it, and its hash is in RECORD: of these only the names are compared.

python .ci/same_wheel.py SDIST WHEEL WHEEL
"""

from __future__ import annotations

import sys
import tarfile
import zipfile


def content(wheel: str) -> dict[str, bytes]:
    """Name -> bytes of every file of a wheel; of compiled ones the name alone."""
    with zipfile.ZipFile(wheel) as archive:
        return {
            name: b"" if name.endswith((".so", ".pyd", "/RECORD")) else archive.read(name)
            for name in archive.namelist()
        }


def links(sdist: str) -> list[str]:
    """Members of an sdist that are not plain files or folders."""
    with tarfile.open(sdist) as archive:
        return [member.name for member in archive if not (member.isfile() or member.isdir())]


def main() -> None:
    """Compare, and say what differs."""
    sdist, first, second = sys.argv[1:]
    if found := links(sdist):
        sys.exit(f"{sdist} has links, which Windows cannot unpack: {', '.join(found)}")
    one, other = content(first), content(second)
    if differ := sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name)):
        sys.exit(f"the wheels differ in {', '.join(differ)}")
    sys.stdout.write(f"both wheels have the same {len(one)} files; no link in the sdist\n")


if __name__ == "__main__":
    main()
