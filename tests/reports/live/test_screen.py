"""The screen of a running job: in any size it fits, and nothing that a recording holds drives the terminal."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfscope.analyzers.live.state import (
    STATES,
    DeviceLoad,
    Event,
    HostLoad,
    LiveRank,
    LiveState,
    LiveStraggler,
)
from perfscope.reports.live.line import as_json, plain
from perfscope.reports.live.screen import rows_that_fit, screen
from perfscope.reports.live.table import sorted_ranks
from perfscope.reports.live.terminal import keys_of
from perfscope.reports.live.view import HELP, SORTS, View
from perfscope.reports.live.words import columns, cut, elapsed, sparkline
from perfscope.reports.paint import Paint

ESCAPE = re.compile(r"\x1b\[[0-9;]*m")
HOSTILE = "\x1b]0;owned\x07\x1b[2J\r\n\x9b31m\u202enode"
SECRET = "hf_abcdefghijklmnopqrstuvwx"

GPU = DeviceLoad(
    index=1, name="H100", uuid="u", utilisation=0.4, memory_used_bytes=40 << 30, memory_bytes=80 << 30, power_w=300.0,
    temperature_c=50.0, sm_mhz=1980.0,
)  # fmt: skip


def state(ranks: int = 4, **more: object) -> LiveState:
    """A job in which rank 2 is slow in its data loading, and rank 3 is gone."""
    stages = {"dataloader": 2000.0, "forward": 10_000.0, "backward": 20_000.0, "optimizer": 3000.0, "other": 5000.0}
    rows = tuple(
        LiveRank(
            rank=rank,
            host=f"node{rank // 8}",
            state="gone" if rank == 3 else "stepping",
            last_step=1234,
            age_s=1.0,
            step_us=40_000.0 + rank % 7,
            run_step_us=41_000.0,
            stages_us=stages,
            excess_us=8000.0 if rank == 2 else float(rank % 5),
            cores=1.5,
            device=GPU,
        )
        for rank in range(ranks)
    )
    usual = LiveState(
        folder="/shared/rec",
        time_ns=1_800_000_000_000_000_000,
        state="running",
        reason="running, but rank 3 is gone (killed, or crashed)",
        command=("torchrun", "--nproc-per-node", "4", "train.py"),
        started_ns=1_799_999_000_000_000_000,
        world_size=ranks,
        hosts_count=1,
        strategies=("ddp",),
        backend="nccl",
        last_step=1234,
        age_s=1.0,
        step_us=40_000.0,
        step_p95_us=45_000.0,
        run_step_us=41_000.0,
        samples_per_step=32.0,
        samples_per_s=800.0,
        run_samples_per_s=780.0,
        stages_us=stages,
        stragglers=(
            LiveStraggler(ranks=(2,), stage="dataloader", delay_us=8000.0, share_of_step=0.2, share_of_steps=0.97),
        ),
        ranks=rows,
        hosts=(
            HostLoad(
                host="node0", cores=64, time_ns=0, cpu_share=0.5, memory_used_bytes=100 << 30, memory_bytes=512 << 30,
                devices=(GPU, replace(GPU, index=2, utilisation=0.9)),
            ),
        ),
        trend_us=tuple(40_000.0 + 1000 * (place % 10) for place in range(100)),
        events=(Event(time_ns=1_800_000_000_000_000_000, text="rank 3 is gone (killed, or crashed)"),),
    )  # fmt: skip
    return replace(usual, **more)  # type: ignore[arg-type]


def shown(of: LiveState, width: int = 120, height: int = 40, view: View | None = None) -> str:
    """The screen without colours."""
    return "\n".join(screen(of, view or View(), Paint(False, width), height))


def test_what_matters_is_on_the_screen() -> None:
    text = shown(state())
    for part in (
        "perfscope watch /shared/rec",
        "running, but rank 3 is gone",
        "torchrun --nproc-per-node 4 train.py · 4 ranks · DDP · nccl · for 16:40",
        "1,234 · 40.0 ms (run: 41.0 ms, p95: 45.0 ms) · 800 samples/s (run: 780)",
        "rank 2: 8.00 ms per step later than its peers (20%), in loading, latest in 97% of steps",
        "loading 5.0%  forward 25%  backward 50%  optimizer 7.5%  other 12%",
        "3 stepping, 1 gone",
        "50% of 64 cores, memory 100 GiB of 512 GiB",
        "65% of 2 devices (least on node0, device 1: 40%), memory up to 40.0 GiB of 80.0 GiB, 600 W",
        "40.0 ms to 49.0 ms",
        "rank 3 is gone (killed, or crashed)",
    ):
        assert part in text


@pytest.mark.parametrize("width", [40, 60, 80, 100, 120])
def test_the_share_of_every_stage_is_shown_at_any_width(width: int) -> None:
    stages = {"dataloader": 2.0, "forward": 10.0, "backward": 20.0, "optimizer": 3.0, "other": 5.0, "waiting": 60.0}
    text = shown(state(stages_us=stages), width=width)
    for part in ("loading 2.0%", "forward 10%", "backward 20%", "optimizer 3.0%", "other 5.0%", "waiting 60%"):
        assert part in text


JOBS = (state(), state(ranks=1024), LiveState(folder="rec", time_ns=0), state(stragglers=(), hosts=()))


@pytest.mark.parametrize("width", [1, 8, 20, 40, 80, 100, 200])
def test_every_size_fits(width: int) -> None:
    for each, height in itertools.product(JOBS, (0, 1, 2, 5, 9, 13, 24, 60)):
        for view in (View(), View(help=True), View(paused=True, top=10_000, sort="r")):
            lines = screen(each, view, Paint(height % 2 == 0, width), height)
            assert len(lines) <= height
            for line in lines:
                assert columns(ESCAPE.sub("", line)) <= width, line


def test_on_a_small_terminal_the_numbers_and_the_worst_ranks_stay() -> None:
    lines = shown(state(), width=60, height=9).split("\n")
    assert any("40.0 ms" in line for line in lines)
    assert any("rank 2: 8.00 ms" in line for line in lines)
    assert any(line.split()[:2] == ["3", "gone"] for line in lines)


@pytest.mark.parametrize("of", ["folder", "command", "host", "event", "problem", "backend"])
def test_what_a_recording_holds_does_not_drive_the_terminal(of: str) -> None:
    bad = f"{HOSTILE} {SECRET}"
    usual = state()
    changed = {
        "folder": replace(usual, folder=bad),
        "command": replace(usual, command=("python", bad)),
        "host": replace(
            usual,
            ranks=tuple(replace(row, host=bad) for row in usual.ranks),
            hosts=(replace(usual.hosts[0], host=bad),),
        ),
        "event": replace(usual, events=(Event(time_ns=0, text=bad),)),
        "problem": replace(usual, problem=bad),
        "backend": replace(usual, backend=bad),
    }[of]
    for text in (shown(changed, width=300), plain(changed), as_json(changed)):
        assert not {letter for letter in text if letter < " " or "\x7f" <= letter <= "\x9f"} - {"\n"}
        assert "\u202e" not in text
        assert SECRET not in text


def test_thousands_of_ranks_are_counted_and_the_worst_are_shown() -> None:
    text = shown(state(ranks=4096), height=30)
    assert "4,095 stepping, 1 gone" in text
    assert re.search(r"^ +3 +gone ", text, re.MULTILINE)
    assert "ranks 1 to " in text.split("\n")[-1]
    assert "of 4,096 by slower by" in text.split("\n")[-1]


def test_ranks_are_sorted_as_the_user_chose() -> None:
    rows = state(ranks=8).ranks
    first = {sort: sorted_ranks(rows, View(sort=sort))[0].rank for sort in SORTS}
    assert (first["d"], first["r"], first["t"]) == (3, 0, 6)
    assert [row.rank for row in sorted_ranks(rows, View(sort="d"))[:2]] == [3, 2]
    assert sorted_ranks(rows, View(sort="r", reverse=True))[0].rank == 7


def test_scrolling_shows_all_ranks() -> None:
    usual, paint = state(ranks=100), Paint(False, 100)
    fit = rows_that_fit(usual, View(), paint, 24)
    seen: set[int] = set()
    view = View(sort="r", page=fit)
    for _ in range(20):
        text = "\n".join(screen(usual, view, paint, 24))
        seen |= {int(rank) for rank in re.findall(r"^ *(\d+)  [a-z]+ ", text, re.MULTILINE)}
        view = view.after("page down") or view
    assert seen == set(range(100))


@pytest.mark.parametrize(
    ("keys", "field", "value"),
    [
        ("p", "paused", True), ("  ", "paused", False), ("t", "sort", "t"), ("R", "reverse", True),
        ("5", "interval_s", 5), ("+", "interval_s", 4), ("-", "interval_s", 1), ("-----", "interval_s", 0.5),
        ("h", "help", True),
        ("hx", "help", False), ("0ü\x00", "sort", "d"),
    ],
)  # fmt: skip
def test_keys_change_what_is_shown(keys: str, field: str, value: object) -> None:
    view = View()
    for key in keys:
        changed = view.after(key)
        assert changed is not None
        view = changed
    assert getattr(view, field) == value


def test_q_quits_from_everywhere_and_help_names_every_key() -> None:
    assert View().after("q") is None
    assert View(help=True).after("q") is None
    named = " ".join(keys for keys, _ in HELP)
    assert all(key in named for key in (*SORTS, "q", "R", "p", "h", "?", "+", "-"))


@given(st.text())
def test_whatever_a_terminal_sends_is_read(text: str) -> None:
    keys = list(keys_of(text))
    assert all(len(key) == 1 or key in ("up", "down", "page up", "page down", "home") for key in keys)
    assert list(keys_of(text + "q"))[-1:] == ["q"] or "\x1b" in text


def test_arrows_are_known_by_name() -> None:
    assert list(keys_of("\x1b[Aq\x1b[6~\x1b[1;5Cx\x1bOB")) == ["up", "q", "page down", "x", "down"]


@given(st.text(), st.integers(0, 30))
def test_text_is_cut_to_columns(text: str, width: int) -> None:
    assert columns(cut(text, width)) <= width


def test_times_and_bars() -> None:
    assert [elapsed(each) for each in (5, 187, 3723, 187_506)] == ["5 s", "3:07", "1:02:03", "2 d 4:05:06"]
    assert sparkline((1.0, 1.01, 1.02), 10) == "▁▁▂"
    assert sparkline(tuple(range(1, 9)), 4) == "▁▃▆█"


def test_the_line_says_it_all() -> None:
    text = plain(state(reason="running"))
    assert text.partition("  ")[2] == (
        "step 1,234 | 40.0 ms (41.0 ms over the run) | 800 samples/s | loading 5.0%, forward 25%, backward 50%, "
        "optimizer 7.5%, other 12% | rank 2 8.00 ms later in loading | CPU 50% | GPU 65%"
    )


def test_a_straggler_of_the_optimizer_alone_is_told_with_what_is_not_timed() -> None:
    alone = state(stages_us={"optimizer": 3_000.0, "other": 97_000.0})
    told = "other stages are not timed: --steps-only times them"
    assert told in plain(alone)
    assert told in shown(alone, width=200)
    assert told not in plain(state())
    assert told not in shown(state(), width=200)


def test_json_is_one_line_with_everything() -> None:
    text = as_json(state(step_us=float("nan")))
    values = json.loads(text)
    assert "\n" not in text
    assert (values["schema"], values["state"], values["step_us"]) == ("perfscope.live/1", "running", None)
    assert values["state"] in STATES
    assert values["ranks"][2]["excess_us"] == 8000.0
