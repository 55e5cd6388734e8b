"""One operator that takes much of the step and is no layer: sorting, counting, copying, drawing random numbers.

Products, attention, convolutions, normalizations and embeddings are what a model is for, and chains of arithmetic are a
compiler's to fuse. What else takes as long is worth a look: a smaller input, a cheaper operator, or fewer steps. Filled
tensors have a rule of their own. Source: torch.topk, torch.sort; PyTorch tutorial "Performance Tuning Guide".
"""

from __future__ import annotations

import re
from typing import Final

from perfscope.analyzers.losses import host_work
from perfscope.analyzers.rank.kernel_classes import COPY, OTHER, REDUCTION
from perfscope.analyzers.rank.time_breakdown import NOT_COMPUTE
from perfscope.analyzers.rules.compute.filled_tensors import FILLING
from perfscope.analyzers.rules.context import RuleContext
from perfscope.results.findings import Action, Confidence, Evidence, Finding, code
from perfscope.results.tables import OperatorRow
from perfscope.text import count_per_step

RULE: Final = "costly-operator"
SHARE: Final = 0.20
"""Least share of the step that the operator takes."""
_OF_LAYERS: Final = re.compile(r"backward|rnn|lstm|gru")
"""Operators that do a layer's backward, or are recurrent layers, whatever their class."""
_CLASSES: Final = (COPY, OTHER, REDUCTION)
_OPERATOR: Final = re.compile(r"\w+::\w+$")
"""Functions of autograd and compiled code have other names, and hold many operators."""


def evaluate(job: RuleContext) -> Finding | None:
    """The finding, or None: no such operator takes that much."""
    rows = [row for row in job.summary.operators if _may_be(row)]
    worst = max(rows, key=job.operator_us, default=None)
    if worst is None or job.operator_us(worst) < SHARE * job.step_time_us:
        return None
    took_us = job.operator_us(worst)
    calls = count_per_step(worst.count_per_step)
    return job.finding(
        RULE,
        f"{worst.name} takes {job.share(took_us):.0%} of the step ({calls} call{'' if calls == '1' else 's'} per step"
        f"{f', within {worst.called_by}' if worst.called_by else ''})",
        took_us,
        evidence=(
            Evidence(f"{worst.name} itself, per step", took_us, "us", job.ranks),
            Evidence("its calls per step", worst.count_per_step, ranks=job.ranks),
        ),
        action=Action(setting=worst.name, old=None, new=None, how=f"{_how(worst)}\n{_where(job, worst)}"),
        confidence=job.confidence(Confidence.MEDIUM),
    )


def _may_be(row: OperatorRow) -> bool:
    named = _OPERATOR.match(row.name) and not _OF_LAYERS.search(row.name) and row.name not in FILLING
    named = named and not NOT_COMPUTE.match(row.name)
    return bool(named) and row.operator_class in _CLASSES


def _how(row: OperatorRow) -> str:
    if _STATISTICS.search(row.called_by or row.name):
        return _WATCHED
    return next((how for pattern, how in _KNOWN if pattern.search(row.name)), _ANY)


def _where(job: RuleContext, row: OperatorRow) -> str:
    """Where it is called, as far as that is known."""
    within = f"{row.called_by} calls it" if row.called_by else "It is called"
    if row.function:
        return f"{within}{',' if row.called_by else ''} in {host_work(row.function)}."
    if row.lines:
        return f"{within}{',' if row.called_by else ''} in {', '.join(row.lines)}."
    if row.called_by:
        return f"{within}."
    return f"Stacks ({'perfscope run --stacks' if job.info.command else 'with_stack=True'}) show where it is called."


_ANY: Final = (
    "Look for a cheaper operator for the same, a smaller input, or a result that can be kept: what does not change "
    "from step to step is computed once, and what is only watched in fewer steps."
)
_TOPK: Final = """
scores = torch.rand(4, 384)
values, index = torch.topk(scores, k=8)  # not torch.sort(scores), of which 8 are used
"""
_STATISTICS: Final = re.compile(r"::(?:nan)?(?:quantile|median|kthvalue|mode|histc|histogram\w*|bincount)$")
_WATCHED: Final = (
    "Such statistics are mostly for a log: take them in fewer steps, or of a sample of the values.\n"
    + code("python", "if step % 100 == 0:\n    spread = torch.quantile(torch.rand(1000), 0.99).item()")
)
_ORDERED: Final = "Order no more than is needed: the largest few of each row take a fraction of the time.\n" + code(
    "python", _TOPK.strip()
)
_COPIED: Final = (
    "Such copies convert a type (.double(), .float(), .half()), change a memory layout (.contiguous(), reshape after a "
    "transpose) or move a tensor to another device. Keep one type and one layout through the model, and make what "
    "stays the same once."
)
_COUNTED: Final = (
    "The size of its result depends on the data, so devices are waited for, and no graph holds it. torch.where keeps "
    "the size, and what only a log needs is counted in fewer steps."
)
_INDEXED: Final = "Sorted indices, each row once, or an embedding with sparse gradients read and write less memory."
_JOINED: Final = "Write into one tensor that is made once, instead of joining parts."
_DRAWN: Final = (
    "Draw random numbers on the device that uses them, no more than are used, and those of the data in the workers of "
    "a DataLoader."
)
_KNOWN: Final = (
    (re.compile(r"sort|topk"), _ORDERED),
    (re.compile(r"copy_|clone|contiguous|_to_copy|::to$"), _COPIED),
    (re.compile(r"unique|nonzero|masked_select"), _COUNTED),
    (re.compile(r"index|gather|scatter|take"), _INDEXED),
    (re.compile(r"::(cat|stack|hstack|vstack)$"), _JOINED),
    (re.compile(r"normal|uniform|rand|bernoulli|multinomial|exponential|poisson"), _DRAWN),
)
"""Names of operators, and what else would do."""
