"""The measures of the code's layout: `python -m tests.house` prints them as a table.

Modules are the files under `perfscope`, its links followed. Imports inside functions and under `TYPE_CHECKING` count,
except for the longest chain. Measured are:

- import cycles: packages some of whose direct children (modules and sub-packages) import each other in a loop, one
  for each loop (a strongly connected component of more than one child);
- imports against the order in `analyzers/`: between its direct children, against the order with the fewest such;
- the longest import chain: modules on the longest path of imports at load time (neither inside a function nor under
  `TYPE_CHECKING`), a loop counted as one;
- class names used twice or more, as a share of all classes;
- the biggest flat folder, in modules;
- lines of the import contracts in pyproject.toml, and of the product's Python.
"""

from __future__ import annotations

import ast
import collections
import dataclasses
import functools
import pathlib
import sys
from collections.abc import Iterable, Iterator

ROOT = pathlib.Path(__file__).resolve().parents[1]
FOLDERS = {
    "perfscope": "perfscope",
    "perfscope.collectors": "collectors",
    "perfscope.analyzers": "analyzers",
    "perfscope.reports": "reports",
}

Edges = dict[str, set[str]]


@dataclasses.dataclass(frozen=True)
class Module:
    """One file: its dotted name, what it imports (names of this project's modules, when loaded and at any time)."""

    name: str
    path: pathlib.Path
    is_package: bool
    at_load: frozenset[str]
    anywhere: frozenset[str]
    classes: tuple[str, ...]
    lines: int
    is_documented: bool


def files(root: pathlib.Path) -> Iterator[tuple[str, pathlib.Path]]:
    """Dotted name and path of each Python file of the product."""
    for package, folder in FOLDERS.items():
        for path in sorted((root / folder).rglob("*.py")):
            parts = path.relative_to(root / folder).parts
            if package == "perfscope" and f"perfscope.{parts[0]}" in FOLDERS:
                continue  # the link
            name = ".".join([package, *parts]).removesuffix(".py").removesuffix(".__init__")
            yield name, path


def _imports(tree: ast.Module) -> Iterator[tuple[str, bool]]:
    """(dotted name, at load) of everything that a file imports; `from a import b` gives `a.b`."""

    def visit(node: ast.AST, at_load: bool) -> Iterator[tuple[str, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from ((alias.name, at_load) for alias in child.names)
            elif isinstance(child, ast.ImportFrom) and child.module is not None:
                yield from ((f"{child.module}.{alias.name}", at_load) for alias in child.names)
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or (
                isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test)
            ):
                yield from visit(child, False)
            else:
                yield from visit(child, at_load)

    yield from visit(tree, True)


def read(root: pathlib.Path = ROOT) -> dict[str, Module]:
    """The product's modules by dotted name."""
    paths = dict(files(root))

    def resolve(imported: str) -> str | None:
        while imported not in paths:
            imported, _, _ = imported.rpartition(".")
            if not imported:
                return None
        return imported

    modules = {}
    for name, path in paths.items():
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        at_load, anywhere = set(), set()
        for imported, loaded in _imports(tree):
            target = resolve(imported)
            if target is not None and target != name:
                anywhere.add(target)
                if loaded:
                    at_load.add(target)
        classes = tuple(node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
        modules[name] = Module(
            name=name,
            path=path,
            is_package=path.name == "__init__.py",
            at_load=frozenset(at_load),
            anywhere=frozenset(anywhere),
            classes=classes,
            lines=text.count("\n"),
            is_documented=ast.get_docstring(tree) is not None,
        )
    return modules


def components(edges: Edges) -> list[list[str]]:
    """Strongly connected components, each after those that it leads to (Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in sorted(edges.get(node, ())):
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            cut = stack.index(node)
            found.append(stack[cut:])
            del stack[cut:]

    for node in sorted(edges):
        if node not in index:
            visit(node)
    return found


def children(modules: dict[str, Module], package: str) -> Edges:
    """Imports between the direct children of a package; what its `__init__` holds itself is the child `__init__`."""

    def child(name: str) -> str | None:
        if name == package:
            return "__init__"
        return name.removeprefix(f"{package}.").split(".")[0] if name.startswith(f"{package}.") else None

    edges: Edges = collections.defaultdict(set)
    for module in modules.values():
        source = child(module.name)
        if source is None:
            continue
        edges[source]
        for target in map(child, module.anywhere):
            # A package's `__init__` runs before each of its modules anyway, and hands on what they define.
            if target is not None and target != source and "__init__" not in (source, target):
                edges[source].add(target)
    return edges


def cycles(modules: dict[str, Module]) -> list[tuple[str, list[str]]]:
    """(package, its children that import each other in a loop)."""
    packages = [module.name for module in modules.values() if module.is_package]
    return [
        (package, sorted(group))
        for package in packages
        for group in components(children(modules, package))
        if len(group) > 1
    ]


def against_the_order(modules: dict[str, Module], package: str = "perfscope.analyzers") -> list[tuple[str, str]]:
    """(lower, higher): imports between a package's children against the order in which fewest run back."""
    edges = children(modules, package)
    up = []
    for group in components(edges):
        place = {name: at for at, name in enumerate(_order(group, edges))}
        up += [(a, b) for a in group for b in edges[a] if b in place and place[b] < place[a]]
    return sorted(up)


def _order(group: list[str], edges: Edges) -> list[str]:
    """Importers first: the greedy order of Eades, Lin and Smyth (1993), by which few imports run back."""
    left, first, last = set(group), list[str](), list[str]()
    while left:
        imports = {name: edges[name] & left for name in left}
        importers = {name: {other for other in left if name in edges[other]} for name in left}
        if sinks := sorted(name for name in left if not imports[name]):
            last[:0] = chosen = sinks
        elif sources := sorted(name for name in left if not importers[name]):
            chosen = sources
            first += chosen
        else:
            chosen = [min(left, key=lambda name, out=imports, into=importers: (len(into[name]) - len(out[name]), name))]
            first += chosen
        left -= set(chosen)
    return first + last


def longest_chain(modules: dict[str, Module]) -> list[str]:
    """The modules of the longest chain of imports at load time, the importer first; a loop gives one module."""
    edges = {name: set(module.at_load) for name, module in modules.items()}
    groups = components(edges)
    of = {name: at for at, group in enumerate(groups) for name in group}

    @functools.cache
    def chain(at: int) -> tuple[int, ...]:
        below = {of[target] for name in groups[at] for target in edges[name]} - {at}
        return (at, *max((chain(target) for target in sorted(below)), key=len, default=()))

    longest = max((chain(at) for at in range(len(groups))), key=len)
    return [groups[at][0] for at in longest]


def repeated_classes(modules: dict[str, Module]) -> tuple[dict[str, int], int]:
    """(name: how many classes have it, where two or more do; how many classes there are)."""
    names = collections.Counter(name for module in modules.values() for name in module.classes)
    return {name: count for name, count in names.items() if count > 1}, sum(names.values())


def biggest_folder(modules: dict[str, Module], root: pathlib.Path = ROOT) -> tuple[str, int]:
    """(folder, modules in it) where most lie side by side."""
    count = collections.Counter(
        str(module.path.parent.relative_to(root)) for module in modules.values() if not module.is_package
    )
    return count.most_common(1)[0]


def contract_lines(root: pathlib.Path = ROOT) -> int:
    """Lines of the import contracts, blank ones left out."""
    lines = (root / "pyproject.toml").read_text(encoding="utf-8").splitlines()
    start = next(at for at, line in enumerate(lines) if line.startswith("[tool.importlinter]"))
    end = next(
        (at for at in range(start + 1, len(lines)) if lines[at].startswith("[") and "importlinter" not in lines[at]),
        len(lines),
    )
    return sum(1 for line in lines[start:end] if line.strip())


def table(root: pathlib.Path = ROOT) -> Iterable[tuple[str, object, str]]:
    """Rows of (measure, value, what it consists of)."""
    modules = read(root)
    loops = cycles(modules)
    back = against_the_order(modules)
    chain = longest_chain(modules)
    repeated, classes = repeated_classes(modules)
    folder, size = biggest_folder(modules, root)
    yield (
        "import cycles in packages",
        len(loops),
        "; ".join(f"{package}: {', '.join(group)}" for package, group in loops),
    )
    yield "imports against the order", len(back), ", ".join(f"{a} -> {b}" for a, b in back)
    yield "longest import chain", len(chain), " > ".join(name.removeprefix("perfscope.") for name in chain)
    used = sum(repeated.values())
    yield (
        "classes whose name is used again",
        f"{used / classes:.1%}",
        ", ".join(f"{n} {c}" for n, c in sorted(repeated.items())),
    )
    yield "modules in the biggest folder", size, folder
    yield "lines of import contracts", contract_lines(root), ""
    yield "modules", len(modules), ""
    yield "lines of Python", sum(module.lines for module in modules.values()), ""


if __name__ == "__main__":
    root = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT
    for measure, value, consists in table(root):
        sys.stdout.write(f"{measure:34} {value!s:>8}  {consists}\n")
