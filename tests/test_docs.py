"""The documentation is complete and true: options, numbers, files, links and commands."""

from __future__ import annotations

import dataclasses
import importlib
import re
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from perfscope.cli.main import VERBS, main
from perfscope.recording import paths, vocabulary
from perfscope.recording.metadata import (
    CaptureMetadata,
    CpuMetadata,
    DataLoaderMetadata,
    DeviceMetadata,
    LaunchMetadata,
    ModelMetadata,
    RunMetadata,
    StepsMetadata,
)
from perfscope.results.categories import CATEGORIES
from perfscope.results.fields import classes_of, fields_of
from perfscope.results.summary import Summary

OPTION = re.compile(r"(?<![\w-])--?[a-z][a-z-]*")


def _read(root: Path, name: str) -> str:
    return (root / name).read_text(encoding="utf-8")


def _section(root: Path, verb: str) -> str:
    """The part of docs/cli.md about one verb."""
    parts = re.split(r"^## `perfscope (\w+)", _read(root, "docs/cli.md"), flags=re.MULTILINE)
    sections = dict(zip(parts[1::2], parts[2::2], strict=True))
    assert set(sections) == set(VERBS)
    return sections[verb]


def _command(verb: str) -> click.Command:
    command = importlib.import_module(f"perfscope.cli.{verb}").command
    assert isinstance(command, click.Command)
    return command


def _names(verb: str) -> set[str]:
    options = [parameter for parameter in _command(verb).params if isinstance(parameter, click.Option)]
    return {name for option in options for name in (*option.opts, *option.secondary_opts)}


@pytest.mark.parametrize("verb", VERBS)
def test_every_option_is_documented(root: Path, verb: str) -> None:
    rows = [line for line in _section(root, verb).splitlines() if line.startswith("| `-")]
    documented = {name for row in rows for name in OPTION.findall(row.split("|")[1])}
    assert documented == _names(verb) | {"-h", "--help"}


@pytest.mark.parametrize("verb", VERBS)
def test_options_named_in_the_text_exist(root: Path, verb: str) -> None:
    """Whatever a verb's own section quotes as ``--option`` belongs to it, or to the command that it is given."""
    quoted = re.findall(r"perfscope \w+ ([^`\n]*?)(?: -- |`|$)", _section(root, verb), flags=re.MULTILINE)
    named = {name for text in quoted for name in OPTION.findall(text) if name.startswith("--")}
    assert named <= _names(verb)


@pytest.mark.parametrize("verb", VERBS)
def test_help_teaches(verb: str) -> None:
    result = CliRunner().invoke(main, [verb, "--help"], terminal_width=120)
    assert result.exit_code == 0, result.output
    for option in _command(verb).params:
        if isinstance(option, click.Option):
            assert option.help, f"perfscope {verb} {option.opts[0]} has no help"
            assert option.opts[-1] in result.output


def test_help_lists_every_verb() -> None:
    result = CliRunner().invoke(main, ["--help"])
    assert result.exit_code == 0
    for verb, line in VERBS.items():
        assert re.search(rf"^\s+{verb}\s+{re.escape(line[:20])}", result.output, flags=re.MULTILINE)


def test_readme_starts_with_the_two_commands(root: Path) -> None:
    block = re.search(r"```\n(.*?)```", _read(root, "README.md"), flags=re.DOTALL)
    assert block is not None
    assert [line.split("#")[0].strip() for line in block[1].splitlines()] == ["make demo", "make test"]


def test_readme_has_every_verb_and_no_other(root: Path) -> None:
    readme = _read(root, "README.md")
    assert set(re.findall(r"^\| `perfscope (\w+)", readme, flags=re.MULTILINE)) == set(VERBS)


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_make_targets_named_exist(root: Path, document: str) -> None:
    targets = set(re.findall(r"^([a-z]+):", _read(root, "Makefile"), flags=re.MULTILINE))
    named = set(re.findall(r"(?:`|^)make ([a-z]+)", _read(root, document), flags=re.MULTILINE))
    assert named
    assert named <= targets


def _documents() -> list[str]:
    root = Path(__file__).parent.parent
    found = [*root.glob("*.md"), *root.glob("docs/*.md"), *root.glob("sample_traces/**/*.md")]
    return sorted(str(path.relative_to(root)) for path in found)


@pytest.mark.parametrize("document", _documents())
def test_links_lead_somewhere(root: Path, document: str) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", _read(root, document)):
        if not target.startswith("http"):
            assert ((root / document).parent / target).exists(), f"{document} links to {target}"


def test_every_category_is_defined(root: Path) -> None:
    table = re.findall(r"^\| `(\w+)_us` \|", _read(root, "docs/metrics.md"), flags=re.MULTILINE)
    assert tuple(table) == CATEGORIES


def test_every_key_that_is_defined_exists(root: Path) -> None:
    keys = {name for kind in classes_of(Summary) for name in fields_of(kind)}
    named = set(re.findall(r"`([a-z]+(?:[._][a-z]+)+)`", _read(root, "docs/metrics.md")))
    others = {
        "record_function",
        "send_recv",
        "torch.compile",
        "torch.distributed.pipelining",
        "torch.profiler",
        "train_step",
        "zero_bubble",
    }
    assert {part for name in named - others for part in name.split(".")} <= keys


@pytest.mark.parametrize(
    "record",
    [
        CaptureMetadata,
        CpuMetadata,
        DataLoaderMetadata,
        DeviceMetadata,
        LaunchMetadata,
        ModelMetadata,
        RunMetadata,
        StepsMetadata,
    ],
)
def test_every_key_of_the_metadata_is_described(root: Path, record: type) -> None:
    quoted = set(re.findall(r"`(\w+)`", _read(root, "docs/recording.md")))
    assert {field.name for field in dataclasses.fields(record)} <= quoted


def test_files_and_ranges_of_a_recording_are_described(root: Path) -> None:
    text = _read(root, "docs/recording.md")
    folder = Path("recording")
    named = (paths.run_file(folder, 0), paths.trace_file(folder, 0, 0), paths.samples_file(folder, "node7"))
    for path in (*named, folder / paths.LAUNCH_FILE):
        assert path.name in text
    for name in (*vocabulary.RANGES, vocabulary.NVTX_STEP_PREFIX, vocabulary.PROFILER_STEP_PREFIX):
        assert f"`{name}" in text


def test_changelog_has_the_version_or_what_comes_next(root: Path) -> None:
    from perfscope import __version__

    assert __version__ in _read(root, "CHANGELOG.md")
