"""Reads a budget: TOML (or JSON) with a table for each number. Every error names the file, the key and the remedy."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from perfscope.analyzers.compare.metrics import CATEGORY_METRICS, METRICS, Metric
from perfscope.errors import UnusableInput, did_you_mean
from perfscope.results.budget import SEVERITIES, Budget, Limit, Quantity
from perfscope.typed import read_bytes, read_json

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TOKENS: Final = Metric(
    "tokens_per_second", "per_second", "higher", lambda _: None, "tokens/s, all ranks",
    "the budget has no per_step, the number of tokens per step", follows_step=True,
)  # fmt: skip
"""Only the training script knows the tokens per step: the budget has them as ``per_step``."""

NUMBERS: Final = {metric.name: metric for metric in (*METRICS, TOKENS, *CATEGORY_METRICS)}
"""The numbers that a budget may limit."""

_UNITS: Final = {
    "ns": (1e-3, "us"), "us": (1.0, "us"), "µs": (1.0, "us"), "ms": (1e3, "us"), "s": (1e6, "us"),
    "B": (1.0, "bytes"), "KiB": (2.0**10, "bytes"), "MiB": (2.0**20, "bytes"), "GiB": (2.0**30, "bytes"),
    "KB": (1e3, "bytes"), "MB": (1e6, "bytes"), "GB": (1e9, "bytes"),
    "%": (0.01, "share"), "/s": (1.0, "per_second"), "points": (0.01, "points"),
}  # fmt: skip
_EXAMPLES: Final = {"us": '"420 ms"', "share": '"15 %" or 0.15', "bytes": '"70 GiB"', "per_second": '"120000 /s"'}
_QUANTITY: Final = re.compile(r"\s*([0-9][0-9_,]*\.?[0-9]*(?:[eE][+-]?[0-9]+)?)\s*([^\s0-9]*)\s*\Z")
_TOP: Final = {"fail_on", "ignore"}
_LARGEST: Final = 1 << 20
_KEYS: Final = {"max", "min", "regression", "optional", "per_step"}


def read_budget(path: str | Path) -> Budget:
    """Read and check a budget. Raises UnusableInput."""
    document = _document(Path(path))
    if not isinstance(document, Mapping):
        raise UnusableInput(f"{path}: the budget has no tables; docs/check.md shows an example")
    try:
        return _budget(document, str(path))
    except UnusableInput as error:
        raise UnusableInput(f"{path}: {error}") from None


def _document(path: Path) -> Any:
    try:
        data = read_bytes(path, _LARGEST)
        return read_json(data) if path.suffix == ".json" else tomllib.loads(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UnusableInput(f"{path}: the budget is not text in UTF-8; docs/check.md shows an example") from error
    except tomllib.TOMLDecodeError as error:
        raise UnusableInput(f"{path}: the budget is not TOML ({error}); docs/check.md shows an example") from error
    except RecursionError as error:
        raise UnusableInput(f"{path}: the budget is nested too deep; docs/check.md shows an example") from error
    except ValueError as error:
        raise UnusableInput(f"{path}: the budget {error}; docs/check.md shows an example") from error


def _budget(document: Mapping[str, Any], source: str) -> Budget:
    fail_on = document.get("fail_on", "none")
    if fail_on not in (*SEVERITIES, "none"):
        raise UnusableInput(f"fail_on = {fail_on!r}: write one of {', '.join((*SEVERITIES, 'none'))}")
    ignore = document.get("ignore", [])
    if not isinstance(ignore, list) or not all(isinstance(rule, str) for rule in ignore):
        raise UnusableInput('ignore: write a list of rules, such as ["dataloader-workers"]')
    limits = []
    for name, table in document.items():
        if name in _TOP:
            continue
        if name not in NUMBERS:
            like = did_you_mean(name, NUMBERS)
            raise UnusableInput(f"[{name}]: no such number{like}; choose from {', '.join(NUMBERS)}")
        if not isinstance(table, Mapping):
            raise UnusableInput(f"{name}: write a table, such as [{name}] with a line {_line(NUMBERS[name])}")
        limits.append(_limit(NUMBERS[name], table))
    if not limits and fail_on == "none":
        raise UnusableInput("the budget limits nothing: add a table, such as [step_time], or fail_on")
    return Budget(
        limits=tuple(limits), fail_on=None if fail_on == "none" else fail_on, ignore=tuple(ignore), source=source
    )


def _limit(metric: Metric, table: Mapping[str, Any]) -> Limit:
    unknown = set(table) - _KEYS
    if unknown:
        first = sorted(unknown)[0]
        like = did_you_mean(first, _KEYS)
        raise UnusableInput(f"[{metric.name}] {first}: no such key{like}; choose from max, min, regression, optional")
    if not {"max", "min", "regression"} & set(table):
        raise UnusableInput(f"[{metric.name}]: has no limit; add {_line(metric)} or regression")
    at_most = _bound(metric, "max", table["max"]) if "max" in table else None
    at_least = _bound(metric, "min", table["min"]) if "min" in table else None
    if at_most and at_least and at_most.unit == at_least.unit and at_most.value < at_least.value:
        raise UnusableInput(f"[{metric.name}]: max is below min, so no value can pass")
    optional, per_step = table.get("optional", False), table.get("per_step")
    if not isinstance(optional, bool):
        raise UnusableInput(f"[{metric.name}] optional: write true or false")
    if metric is TOKENS and not _is_number(per_step):
        raise UnusableInput(f"[{metric.name}] per_step: write the number of tokens per step, all ranks")
    if metric is not TOKENS and per_step is not None:
        raise UnusableInput(f"[{metric.name}] per_step: only for tokens_per_second")
    return Limit(
        metric=metric.name,
        at_most=at_most,
        at_least=at_least,
        regression=_regression(metric, table["regression"]) if "regression" in table else None,
        optional=optional,
        per_step=float(per_step) if per_step is not None else None,
    )


def _bound(metric: Metric, key: str, value: object) -> Quantity:
    units = {metric.unit}
    if metric.categories:
        units.add("us")
    if metric.name == "straggler_cost":
        units.add("share")
    bound = _quantity(metric, key, value)
    if bound.unit not in units:
        examples = " or ".join(_EXAMPLES[unit] for unit in sorted(units))
        raise UnusableInput(f"[{metric.name}] {key} = {value!r}: write {examples}")
    return bound


def _regression(metric: Metric, value: object) -> Quantity:
    """Percent of the baseline's value, percentage points of a share, or an amount in the number's own unit."""
    allowed = _quantity(metric, "regression", value, bare=None)
    if allowed.unit == "share":
        return Quantity(value=allowed.value, unit="percent")
    if allowed.unit == "points" and metric.unit == "share":
        return Quantity(value=allowed.value, unit="share")
    if allowed.unit == metric.unit != "share":
        return allowed
    own = '"2 points"' if metric.unit == "share" else _EXAMPLES[metric.unit]
    raise UnusableInput(f'[{metric.name}] regression = {value!r}: write "5 %" (of the baseline) or {own}')


def _quantity(metric: Metric, key: str, value: object, bare: str | None = "") -> Quantity:
    """A number with its unit; without a unit it is a share or a rate."""
    where = f"[{metric.name}] {key} = {value!r}"
    if _is_number(value):
        if bare is None or metric.unit not in ("share", "per_second"):
            example = '"5 %"' if key == "regression" else _EXAMPLES[metric.unit]
            raise UnusableInput(f"{where}: give the unit, such as {example}")
        if metric.unit == "share" and not 0 <= float(str(value)) <= 1:
            raise UnusableInput(f'{where}: a share is 0 to 1; in percent write "{value} %"')
        return Quantity(value=float(str(value)), unit=metric.unit)
    match = _QUANTITY.match(value) if isinstance(value, str) else None
    if match is None:
        raise UnusableInput(f"{where}: write a number and its unit, such as {_EXAMPLES[metric.unit].split(' or ')[0]}")
    number, unit = float(match[1].replace(",", "").replace("_", "")), match[2]
    if unit not in _UNITS:
        wrong = f"no unit {unit!r}" if unit else "the unit is missing"
        raise UnusableInput(f"{where}: {wrong}; choose from {', '.join(_UNITS)}")
    factor, kind = _UNITS[unit]
    return Quantity(value=number * factor, unit=kind)


def _line(metric: Metric) -> str:
    key = "max" if metric.better == "lower" else "min"
    return f"{key} = {_EXAMPLES[metric.unit].split(' or ')[0]}"


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
