"""``perfscope whatif``: what a step would take with settings changed, from a recording."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from perfscope.cli.answers import Sweep, SweepPoint, WhatIf
from perfscope.cli.number import Whole
from perfscope.errors import UnusableInput
from perfscope.results.accuracy import accuracy_in_words

if TYPE_CHECKING:
    from perfscope.analyzers.whatif.change import Context
    from perfscope.analyzers.whatif.predict import WhatIfAnswer
    from perfscope.reports.paint import Paint

_MOST_POINTS: Final = 200
"""Points of a sweep: more show nothing new and take long."""


def _print_settings(context: click.Context, _parameter: click.Parameter, wanted: bool) -> None:
    """``--list``, which needs no TRACES."""
    if not wanted:
        return
    from perfscope.analyzers.whatif.predict import SETTINGS

    for setting in SETTINGS:
        click.echo(f"{f'{setting.name}={setting.value}':34} {setting.help}")
    context.exit()


@click.command("whatif")
@click.argument("traces", type=click.Path(path_type=Path))
@click.argument("changes", nargs=-1, metavar="[NAME=VALUE]...")
@click.option("--set", "settings", multiple=True, metavar="NAME=VALUE", help="The same as an option; may be repeated.")
@click.option(
    "--sweep", metavar="NAME=A..B|A,B,…", help="Predict for each value of one setting; A..B doubles from A up to B."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.option(
    "--capture",
    type=Whole(min=0),
    metavar="N",
    help="Which capture to replay, counted from 0.  [default: the last one that most ranks have]",
)
@click.option(
    "--list", is_flag=True, is_eager=True, expose_value=False, callback=_print_settings, help="List all settings."
)
def command(
    traces: Path, changes: tuple[str, ...], settings: tuple[str, ...], sweep: str | None, as_json: bool,
    capture: int | None,
) -> None:  # fmt: skip
    """Predict the step time with settings changed.

    The recorded steps of all ranks are replayed with the change; how accurate such predictions have been is shown
    with each. Several settings are predicted one by one and together.

    \b
    perfscope whatif perfscope-recording ddp.bucket_cap_mb=100
    perfscope whatif perfscope-recording network.bandwidth=2x rank.3=peers
    perfscope whatif perfscope-recording --sweep dataloader.num_workers=1..16
    """
    from perfscope.analyzers.whatif.whatif import context_of

    asked = _asked(changes + settings, sweep)
    if not asked and sweep is None:
        raise UnusableInput("nothing to change: add NAME=VALUE or --sweep NAME=A..B; --list shows all settings")
    context = context_of(traces, capture=capture)
    if sweep is not None:
        _sweep(context, asked, sweep, as_json)
    else:
        _table(context, asked, as_json)


def _asked(changes: tuple[str, ...], sweep: str | None) -> dict[str, str]:
    """Name -> value. Raises UnusableInput for a setting with two values: a step has one of each."""
    values: dict[str, list[str]] = {}
    for name, value in map(_split, changes):
        if value not in values.setdefault(name, []):
            values[name].append(value)
    swept = _split(sweep)[0] if sweep is not None else ""
    for name, given in values.items():
        if name == swept:
            raise UnusableInput(f"{name} is both set and swept: leave out --set {name}={given[0]}")
        if len(given) > 1:
            raise UnusableInput(
                f"{name} is set to {' and '.join(given)}, but settings are changed together: to compare its values, "
                f"write --sweep {name}={','.join(given)}"
            )
    return {name: given[0] for name, given in values.items()}


def _split(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name or not value:
        raise UnusableInput(f"{text!r}: write NAME=VALUE, such as network.bandwidth=2x")
    return name.strip(), value.strip()


def _table(context: Context, asked: Mapping[str, str], as_json: bool) -> None:
    """Each setting alone, then all together."""
    from perfscope.analyzers.whatif.change import CannotReplay
    from perfscope.analyzers.whatif.predict import predict

    together = predict(context, asked)
    if as_json:
        click.echo(json.dumps(WhatIf(**_values_of(together)).to_dict()))
        return
    paint = _head(together)
    if len(asked) > 1:
        for name, value in asked.items():
            try:
                _row(f"{name}={value}", predict(context, {name: value}), paint)
            except CannotReplay as reason:
                click.echo(f"{f'{name}={value}':40} cannot be replayed alone: {reason}")
    _row(" ".join(f"{name}={value}" for name, value in asked.items()), together, paint)
    _notes(together)


def _sweep(context: Context, asked: Mapping[str, str], text: str, as_json: bool) -> None:
    """A curve over one setting."""
    from perfscope.analyzers.whatif.whatif import sweep

    name, span = _split(text)
    values = list(_values(name, span))
    answers = sweep(context, asked, name, values)
    if as_json:
        points = [SweepPoint(value=value, **_values_of(each)) for value, each in zip(values, answers, strict=True)]
        click.echo(json.dumps(Sweep(setting=name, points=tuple(points)).to_dict()))
        return
    paint = _head(answers[0])
    best = min(answers, key=lambda answer: answer.mid_ns)
    for value, answer in zip(values, answers, strict=True):
        _row(f"{name}={value}", answer, paint, "  <- best" if answer is best else "")
    _notes(best)


def _values(name: str, span: str) -> Iterator[str]:
    """``1..16`` is 1, 2, 4, 8, 16; ``10,25,50`` are the values themselves."""
    first, dots, last = span.partition("..")
    if not dots:
        yield from (value.strip() for value in span.split(",")[:_MOST_POINTS])
        return
    try:
        value, end = float(first), float(last)
    except ValueError:
        raise UnusableInput(
            f"{name}={span}: write a range of numbers, such as 1..16, or values, such as 10,25"
        ) from None
    if not 0 <= value < end:
        raise UnusableInput(f"{name}={span}: write the smaller number of the range first")
    while value < end:
        yield f"{value:g}"
        value = value * 2 if value >= 1 else value + 1
    yield f"{end:g}"


def _head(answer: WhatIfAnswer) -> Paint:
    """Print what the rows are compared with; how standard output shows them."""
    from perfscope.reports.paint import Paint

    replayed = f"replayed without a change: {answer.replayed_ns / 1e6:.2f} ms"
    if answer.profiled_ns is not None:
        replayed = f"with the profiler: {answer.profiled_ns / 1e6:.2f} ms; {replayed}"
    click.echo(f"measured step {answer.measured_ns / 1e6:.2f} ms ({replayed})")
    click.echo(f"{'setting':40} {'step ms':>9}  {'low':>9} .. {'high':<9} {'change':>7}")
    return Paint.of(sys.stdout)


def _row(what: str, answer: WhatIfAnswer, paint: Paint, remark: str = "") -> None:
    share = answer.mid_ns / answer.measured_ns
    sure = answer.high_ns < answer.measured_ns or answer.low_ns > answer.measured_ns
    change = paint.tone(f"{share - 1:+7.1%}", ("good" if share < 1 else "bad") if sure else "")
    click.echo(
        f"{what:40} {answer.mid_ns / 1e6:9.2f}  {answer.low_ns / 1e6:9.2f} .. {answer.high_ns / 1e6:<9.2f} "
        f"{change}{paint.bar(share)}{remark}"
    )


def _notes(answer: WhatIfAnswer) -> None:
    for assumed in answer.assumed:
        click.echo(f"note: {assumed}")
    if answer.settings:
        click.echo(f"note: {accuracy_in_words(answer.settings)}")


def _values_of(answer: WhatIfAnswer) -> dict[str, Any]:
    """The fields of ``answers.PredictedStep``."""
    return {
        "measured_step_us": answer.measured_ns / 1e3,
        "profiled_step_us": None if answer.profiled_ns is None else answer.profiled_ns / 1e3,
        "replayed_step_us": answer.replayed_ns / 1e3,
        "predicted_step_us": answer.predicted_us,
        "error": answer.error,
        "settings": dict(answer.settings),
        "assumed": answer.assumed,
    }
