"""The screen of a running job, in any size: what matters most stays when a terminal is small."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timezone
from typing import Final

from perfscope.analyzers.live.state import ENDED, FAILED, RUNNING, STALLED, LiveState, LiveStraggler
from perfscope.reports.live import table
from perfscope.reports.live.view import HELP, SORTS, View
from perfscope.reports.live.words import (
    OTHERS_UNKNOWN,
    STAGE_COLOURS,
    columns,
    cut,
    elapsed,
    safe,
    sparkline,
    stage_word,
)
from perfscope.reports.paint import Paint
from perfscope.results.history import OTHER
from perfscope.text import byte_size, duration, percent, plural, rank_list, ranks_in_words, significant

_TONES: Final = {RUNNING: "good", STALLED: "bad", FAILED: "bad", ENDED: "good"}
_LABEL: Final = 11
"""Columns of a line's name."""
_LEAST_ROWS: Final = 4
"""Lines of the table, its heading included, for which all else makes room."""
_BAR: Final = 20
_EVENTS: Final = 3
_STRAGGLERS: Final = 3


def screen(state: LiveState, view: View, paint: Paint, height: int) -> list[str]:
    """At most ``height`` lines of at most ``paint.width`` columns, without escapes of anybody but ``paint``."""
    if height < 1:
        return []
    if view.help:
        return [_title(state, view, paint), "", *_help(paint)][:height]
    head = [_title(state, view, paint), *_job(state, paint)]
    # From the most important to the least.
    parts = [_numbers(state, paint), _stragglers(state, paint), _stages(state, paint), _counts(state, paint)]
    parts += [_load(state, paint), _trend(state, paint), _events(state, paint)]
    lines, room = list(head), height - _LEAST_ROWS
    for part in parts:
        if len(lines) + len(part) <= room:
            lines += part
    lines = lines[:height]
    left = height - len(lines)
    if left >= 2 and state.ranks:
        lines += [""] if left > _LEAST_ROWS else []
        lines += _table(state, view, paint, height - len(lines))
    return lines


def rows_that_fit(state: LiveState, view: View, paint: Paint, height: int) -> int:
    """Ranks that the screen shows."""
    heading = table.heading(table.chosen_columns(state.ranks, paint.width))
    lines = screen(state, View(interval_s=view.interval_s), Paint(False, paint.width), height)
    shown = len(lines) - lines.index(heading) - 1 if heading in lines else 0
    return shown if shown >= len(state.ranks) else max(shown - 1, 0)


def _title(state: LiveState, view: View, paint: Paint) -> str:
    now = datetime.fromtimestamp(state.time_ns / 1e9, tz=timezone.utc).astimezone().strftime("%H:%M:%S")
    right = f"paused at {now}" if view.paused else f"{now}, every {view.interval_s:g} s, h: help"
    left = cut(f"perfscope watch {safe(state.folder)}", max(paint.width - columns(right) - 2, 0))
    gap = paint.width - columns(left) - columns(right)
    text = cut(left + " " * max(gap, 1) + right, paint.width)
    return paint.bold(text)


def _job(state: LiveState, paint: Paint) -> list[str]:
    lines = [paint.tone(cut(state.reason, paint.width), _TONES.get(state.state, ""))]
    if state.problem:
        lines.append(paint.tone(cut(safe(state.problem), paint.width), "bad"))
    known = [
        safe(" ".join(state.command)),
        plural(state.world_size, "rank") if state.world_size else "",
        plural(state.hosts_count, "host") if state.hosts_count > 1 else "",
        ", ".join(state.strategies).upper() if state.strategies else "",
        safe(state.backend),
        f"attempt {state.restarts + 1}" if state.restarts else "",
        f"for {elapsed((state.time_ns - state.started_ns) / 1e9)}"
        if state.started_ns and state.state not in (ENDED, FAILED)
        else "",
        plural(state.captures, "capture") if state.captures else "",
    ]
    # The command is the longest part, and gives way.
    rest = " · ".join(part for part in known[1:] if part)
    command = cut(known[0], max(paint.width - columns(rest) - 3, 12)) if known[0] else ""
    text = " · ".join(part for part in (command, rest) if part)
    return [*lines, paint.faint(cut(text, paint.width))] if text else lines


def _numbers(state: LiveState, paint: Paint) -> list[str]:
    if state.last_step < 0:
        return []
    since = f"since step {state.first_step:,}" if state.first_step > 1 else "run"
    parts = [
        f"{state.last_step:,}",
        f"{duration(state.step_us)} ({since}: {duration(state.run_step_us)}, p95: {duration(state.step_p95_us)})",
    ]
    if state.samples_per_s is not None:
        parts.append(f"{significant(state.samples_per_s)} samples/s")
        if state.run_samples_per_s is not None:
            parts[-1] += f" ({since}: {significant(state.run_samples_per_s)})"
    elif state.step_us:
        parts.append(f"{significant(1e6 / state.step_us)} steps/s")
    return [_labelled("step", " · ".join(parts), paint)]


def _stragglers(state: LiveState, paint: Paint) -> list[str]:
    if state.not_compared:
        return [_labelled("straggler", f"not looked for: {state.not_compared}", paint)]
    lines = [
        _labelled("straggler" if not place else "", _straggler(row), paint, "warning")
        for place, row in enumerate(state.stragglers[:_STRAGGLERS])
    ]
    if more := len(state.stragglers) - _STRAGGLERS:
        lines += [_labelled("", f"and {plural(more, 'more rank')}", paint)] if more > 0 else []
    if not lines and state.last_step >= 0 and len(state.ranks) > 1:
        lines = [_labelled("straggler", "none", paint)]
    if lines and not state.times_stages:
        lines[-1] += f" ({OTHERS_UNKNOWN})"
    return lines


def _straggler(row: LiveStraggler) -> str:
    late = f"{duration(row.delay_us)} per step later than {'its' if len(row.ranks) == 1 else 'their'} peers"
    often = f"latest in {percent(row.share_of_steps)} of steps"
    return f"{ranks_in_words(row.ranks)}: {late} ({percent(row.share_of_step)}), in {stage_word(row.stage)}, {often}"


def _stages(state: LiveState, paint: Paint) -> list[str]:
    total = sum(state.stages_us.values())
    if total <= 0 or not state.times_stages:
        return []
    shares = {stage: max(us, 0.0) / total for stage, us in state.stages_us.items()}
    words = [f"{stage_word(stage)} {percent(share)}" for stage, share in shares.items()]
    on_one_line = columns("  ".join(words))
    wide = paint.width >= _LABEL + _BAR + 2 + on_one_line
    bar = (
        paint.stack(((STAGE_COLOURS.get(stage, STAGE_COLOURS[OTHER]), share) for stage, share in shares.items()), _BAR)
        if wide
        else ""
    )
    lines = _filled(words, max(_room(paint), 1))
    return [_name("" if place else "stages", paint) + ("" if place else bar) + line for place, line in enumerate(lines)]


def _filled(words: list[str], width: int) -> list[str]:
    """The words on as few lines of ``width`` columns as hold them; one that is wider alone is cut."""
    lines: list[str] = []
    for word in words:
        if lines and columns(f"{lines[-1]}  {word}") <= width:
            lines[-1] += f"  {word}"
        else:
            lines.append(cut(word, width))
    return lines


def _counts(state: LiveState, paint: Paint) -> list[str]:
    counts = {name: number for name, number in state.rank_counts().items() if number}
    if not counts and not state.missing_ranks:
        return []
    parts = [f"{number:,} {name}" for name, number in counts.items()]
    if state.missing_ranks:
        parts.append(f"{len(state.missing_ranks):,} not yet heard of ({rank_list(state.missing_ranks, 4)})")
    troubled = bool(counts.keys() & set(table.TROUBLED))
    return [_labelled("ranks", ", ".join(parts), paint, "warning" if troubled else "")]


def _load(state: LiveState, paint: Paint) -> list[str]:
    lines = []
    busy = [host for host in state.hosts if host.cpu_share is not None]
    if busy:
        most = max(busy, key=lambda host: host.cpu_share or 0.0)
        shares = [host.cpu_share or 0.0 for host in busy]
        text = f"{percent(sum(shares) / len(shares))} of {sum(host.cores or 0 for host in busy):,} cores"
        text += f" (most on {safe(most.host)}: {percent(most.cpu_share)})" if len(busy) > 1 else ""
        used = max(busy, key=lambda host: _share(host.memory_used_bytes, host.memory_bytes))
        text += f", memory {byte_size(used.memory_used_bytes)} of {byte_size(used.memory_bytes)}"
        text += f" on {safe(used.host)}" if len(busy) > 1 else ""
        lines.append(_labelled("CPU", text, paint))
    devices = [(host.host, device) for host in state.hosts for device in host.devices if device.utilisation is not None]
    if devices:
        shares = [device.utilisation or 0.0 for _, device in devices]
        host, least = min(devices, key=lambda each: each[1].utilisation or 0.0)
        text = f"{percent(sum(shares) / len(shares))} of {plural(len(devices), 'device')}"
        text += (
            f" (least on {safe(host)}, device {least.index}: {percent(least.utilisation)})" if len(devices) > 1 else ""
        )
        fullest = max(
            (device for _, device in devices), key=lambda each: _share(each.memory_used_bytes, each.memory_bytes)
        )
        text += f", memory up to {byte_size(fullest.memory_used_bytes)} of {byte_size(fullest.memory_bytes)}"
        power = [device.power_w for _, device in devices if device.power_w is not None]
        text += f", {significant(sum(power))} W" if power else ""
        lines.append(_labelled("GPU", text, paint))
    return lines


def _trend(state: LiveState, paint: Paint) -> list[str]:
    values = state.trend_us
    if len(values) < 2:
        return []
    text = f"{duration(min(values))} to {duration(max(values))}"
    room = min(_room(paint) - columns(text) - 2, 60)
    return [_name("step time", paint) + f"{sparkline(values, room)}  {text}"] if room >= 8 else []


def _events(state: LiveState, paint: Paint) -> list[str]:
    lines = []
    for place, event in enumerate(state.events[-_EVENTS:]):
        moment = datetime.fromtimestamp(event.time_ns / 1e9, tz=timezone.utc).astimezone().strftime("%H:%M:%S")
        lines.append(_labelled("events" if not place else "", f"{moment} {safe(event.text)}", paint))
    if state.further_jobs:
        lines.append(_labelled("also", f"further trainings of the command: {', '.join(state.further_jobs)}", paint))
    return lines


def _table(state: LiveState, view: View, paint: Paint, height: int) -> list[str]:
    shown = table.chosen_columns(state.ranks, paint.width)
    rows = table.sorted_ranks(state.ranks, view)
    room = height - 1
    lines = [paint.bold(table.heading(shown))]
    whole = len(rows) <= room
    count = room if whole else max(room - 1, 1)  # one line says what is left out
    first = min(view.top, max(len(rows) - count, 0))
    taken = rows[first : first + count]
    lines += [paint.tone(table.line(row, shown), table.tone(row, state.step_us)) for row in taken]
    if not whole and room > 1:
        last = first + len(taken)
        text = f"ranks {first + 1:,} to {last:,} of {len(rows):,} by {SORTS[view.sort]}"
        lines.append(paint.faint(cut(text + (", reversed" if view.reverse else ""), paint.width)))
    return lines


def _help(paint: Paint) -> Iterable[str]:
    width = max(columns(keys) for keys, _ in HELP)
    for keys, meaning in HELP:
        yield cut(f"  {keys:<{width}}  {meaning}", paint.width)


def _labelled(name: str, text: str, paint: Paint, tone: str = "") -> str:
    return _name(name, paint) + paint.tone(cut(text, _room(paint)), tone)


def _room(paint: Paint) -> int:
    """Columns beside a line's name; where there are few, lines have none."""
    return paint.width - _LABEL if paint.width >= 3 * _LABEL else paint.width


def _name(name: str, paint: Paint) -> str:
    if _room(paint) == paint.width:
        return ""
    return paint.faint(f"{name:<{_LABEL}}") if name else " " * _LABEL


def _share(used: float | None, of: float | None) -> float:
    return used / of if used is not None and of else 0.0
