"""A summary for outside names nobody's hosts, folders, models or functions, and says the same with other names."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from typing import Any

from perfscope.reports.page import page
from perfscope.results.anonymous import anonymous
from perfscope.results.memory.snapshots import GrowthRow, HolderRow, MemorySnapshots
from perfscope.results.notes import Note
from perfscope.results.summary import Summary
from perfscope.results.tables import ModuleRow
from tests.reports import examples
from tests.reports.packed import readable

OWN = ("node-a", "gpu-acme-17", "AcmeGPT", "AcmeBlock", "jdoe", "acme-bucket", "wiki.acme.com", "train_acme")


def job() -> Summary:
    """The straggler's job with somebody's names in it."""
    made = examples.straggler()
    modules = tuple(
        ModuleRow(name=name, depth=0, count_per_step=1, host_us_per_step=9, device_us_per_step=8, kernels_per_step=3)
        for name in ("nn.Module: AcmeBlock_0", "nn.Module: AcmeBlock_1", "perfscope::forward", "loss")
    )
    text = (
        "The loss of gpu-acme-17's rank: see https://wiki.acme.com/runs?x=1, /home/jdoe/acme/train_acme.py and "
        "s3://acme-bucket/jdoe/run (module nn.Module: AcmeBlock_1, 3 of 4 kernels, and/or 12 µs/step)."
    )
    return dataclasses.replace(
        made,
        source="/home/jdoe/acme/traces",
        modules=modules,
        notes=(Note(about="job", kind="clock_jump", text=text, ranks=(0,)), *made.notes),
        job=dataclasses.replace(
            made.job,
            hosts=("node-a", "gpu-acme-17"),
            command=("torchrun", "/home/jdoe/acme/train_acme.py", "--data", "acme-bucket"),
            model={"name": "AcmeGPT", "parameters": 12},
        ),
    )


def leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for each in value.values():
            yield from leaves(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from leaves(each)
    else:
        yield value


def test_no_name_of_somebodys_is_left_in_the_json_or_the_page() -> None:
    summary = anonymous(job())
    for written in (json.dumps(summary.to_dict()), readable(page.render(summary))):
        assert [name for name in OWN if name in written] == []


def test_names_that_a_page_holds_packed_are_seen() -> None:
    """So that the test above can fail: most of a page is packed, the whole summary among it."""
    html = page.render(job())
    packed = html[html.index('id="summary"') :].split("</script>", 1)[0]
    assert not any(name in packed for name in ("gpu-acme-17", "AcmeBlock"))
    assert all(name in readable(packed) for name in OWN)


def test_what_memory_snapshots_name_is_replaced_too() -> None:
    place: dict[str, Any] = {
        "rank": 0, "device": 0, "phase": "forward", "module": "acme_model.py:30 › linear:134", "function": "acme_step",
        "file": "/home/jdoe/acme/train_acme.py", "line": 3, "label": "acme-label",
    }  # fmt: skip
    grown = GrowthRow(**place, bytes_per_step=5, first_bytes=1, last_bytes=11, steps=2)
    held = HolderRow(**place, bytes=5, share=1.0, allocations=1, largest_bytes=5, kept_bytes=0)
    found = MemorySnapshots(devices=(), holders=(held,), growth=(grown,))
    note = Note(about="memory", kind="grows", text=f"It grows in {grown.where}.", ranks=(0,))
    summary = dataclasses.replace(job(), snapshots=found, notes=(note,))
    written = json.dumps(anonymous(summary).to_dict())
    assert not re.search("acme|jdoe", written, re.IGNORECASE)
    assert "forward of module-" in written


def test_one_name_has_one_number_in_tables_and_sentences() -> None:
    summary = anonymous(job())
    other = summary.job.hosts[1]
    assert set(summary.job.hosts) == {"host-1", "host-2"}
    assert [row.name for row in summary.modules] == ["module-1", "module-2", "perfscope::forward", "module-3"]
    assert summary.notes[0].text == (
        f"The loss of {other}'s rank: see address-1, path-1.py and address-2 (module module-2, 3 of 4 kernels, and/or "
        "12 µs/step)."
    )
    assert summary.job.model == {"name": "model-1", "parameters": 12}
    assert summary.job.command == ()


def test_everything_else_stays() -> None:
    before, after = job(), anonymous(job())
    numbers = [
        [each for each in leaves({**summary.to_dict(), "job": None}) if not isinstance(each, str)]
        for summary in (before, after)
    ]
    assert numbers[0] == numbers[1]
    assert after.verdict.healthy == before.verdict.healthy
    assert [finding.rule for finding in after.findings] == [finding.rule for finding in before.findings]
    assert anonymous(after).to_dict() == {**after.to_dict()}
