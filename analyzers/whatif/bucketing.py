"""How DistributedDataParallel fills its buckets, and what recorded buckets show of the parameters in them.

``compute_bucket_assignment_by_size`` in torch's ``reducer.cpp``: gradients are put into a bucket in the order in which
they become ready, until it reaches its limit; none is divided. The first bucket's limit is 1 MiB where the bucket size
is torch's default; since torch 2.5 it is ``bucket_cap_mb`` where that is set.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Final

import numpy as np

from perfscope.recording.metadata import RunMetadata
from perfscope.trace.trace import Float64

MIB: Final = 1 << 20
FIRST_BUCKET: Final = 1 * MIB
"""torch.distributed's ``_DEFAULTFIRST_BUCKET_BYTES``."""
DEFAULT_CAP: Final = 25.0
"""``bucket_cap_mb`` where it is not set."""
_ONE_LIMIT: Final = (2, 5)
"""The torch version since which ``bucket_cap_mb`` is the first bucket's limit, too (pytorch pull request 121640)."""
_LARGE: Final = 1.5
"""Bytes of a bucket over its limit from which its last parameter is known to be a large one."""
_SEVERAL: Final = 2
"""Times as many buckets as the limit would make, from which several models or backwards fill them."""
_MOST_IN_A_BUCKET: Final = 256
"""Most equal parameters in the smallest bucket: with more of them, bytes become ready almost evenly."""
_NUMBERS: Final = np.arange(_MOST_IN_A_BUCKET, 0, -1)[:, None]
"""Of parameters in the smallest bucket, as they are tried."""
_HALF: Final = 0.5
_COMPRESSES: Final = re.compile("(bf16|fp16)_compress")
"""``default_hooks``, also around other hooks (``bf16_compress_wrapper``)."""
_SAME: Final = 0.01
"""Share by which bytes may differ that are the same."""
_WHOLE: Final = 0.03
"""How far from a whole number of equal parameters a bucket may be, because of biases and norms."""


def limits(runs: Mapping[int, RunMetadata], cap: float, sent: float = 1.0) -> tuple[float, float]:
    """(first bucket's limit, the others'), bytes that are sent, where ``bucket_cap_mb`` is set to ``cap`` bytes of
    gradients; ``sent`` as ``sent_share`` finds it.
    """
    before = any(_version(run.versions.get("torch", "")) < _ONE_LIMIT for run in runs.values())
    return sent * (min(cap, FIRST_BUCKET) if before else cap), sent * cap


def sent_share(runs: Mapping[int, RunMetadata], sent: float) -> float:
    """Of each byte of gradients, which limits count, the share that is sent (``sent`` bytes of all): a half where a
    hook sends gradients in 16 bits that are kept in 32, by its name or by what the model holds.
    """
    for run in runs.values():
        held = sum(run.model.trainable_sizes) if run.model is not None else 0
        named = _COMPRESSES.search(str(run.settings.get("ddp", {}).get("comm_hook", "")))
        if abs(_HALF * held - sent) <= _SAME * sent if held else named:
            return _HALF
    return 1.0


def limited_share(runs: Mapping[int, RunMetadata], buckets: Sequence[int], parameters: Sequence[float] | None) -> float:
    """Of each byte that limits count, the share that is sent: ``sent_share``, but 1 where the recorded ``buckets`` are
    those that the recorded limit makes of the bytes that are sent, and not those that it makes of 32 bits: gradients
    are then kept in 16, whatever the model's parameters are.
    """
    share, known = sent_share(runs, sum(buckets)), bucket_cap(runs)
    if share == 1 or known is None or parameters is None:
        return share
    made = {each: _made_by_limit(each * known * MIB, each * FIRST_BUCKET, buckets, parameters) for each in (share, 1.0)}
    return 1.0 if made[1.0] and not made[share] else share


def _made_by_limit(cap: float, first: float, buckets: Sequence[int], parameters: Sequence[float]) -> bool:
    """Are these the buckets that such a limit makes, for the first of them as for the others, or with its own?"""
    for limit in (min(first, cap), cap):
        made = bucket_bytes(bucket_ends(float(sum(buckets)), limit, cap, parameters))
        if len(made) == len(buckets) and np.allclose(made, buckets, rtol=_SAME):
            return True
    return False


def _version(text: str) -> tuple[int, ...]:
    """``2.4.1+cu121`` is (2, 4); of another form, the newest."""
    numbers = re.match(r"(\d+)\.(\d+)", text)
    return (int(numbers[1]), int(numbers[2])) if numbers else _ONE_LIMIT


def parameter_bytes(
    runs: Mapping[int, RunMetadata],
    buckets: Sequence[int],
    traced: Iterable[Sequence[int]] = (),
    counts: Sequence[int] = (),
) -> tuple[list[float], bool] | None:
    """Bytes of each parameter's gradient in the order in which they become ready, and whether these were recorded; None
    where they are not known. ``buckets`` are the recorded ones, in order, and ``counts`` the number of gradients in
    each; ``traced`` are gradients' bytes as ranks' traces show them.
    """
    total = sum(buckets)
    of_models = (run.model.trainable_sizes[::-1] for run in runs.values() if run.model is not None)
    for sizes in filter(None, chain(traced, of_models)):
        if abs(sent_share(runs, total) * sum(sizes) - total) <= _SAME * total:
            return [size * total / sum(sizes) for size in sizes], True
    known = bucket_cap(runs)
    cap = sent_share(runs, total) * (DEFAULT_CAP if known is None else known) * MIB
    if counts and len(counts) == len(buckets):
        each = zip(buckets, counts, strict=True)
        return [size for bucket, count in each for size in _of_count(bucket, count, cap)], False
    size = _equal_parameters(buckets, cap)
    if size is None:
        # A lone bucket whose limit is not recorded may have a limit that all gradients fit.
        is_known = known is not None or len(buckets) > 1
        return (_around_large_ones(buckets, cap), False) if is_known and max(buckets) > _LARGE * cap else None
    count = round(total / size)
    return [total / count] * count, False


def _of_count(bucket: int, count: int, cap: float) -> list[float]:
    """So many gradients that fill this bucket: equal ones, but for a last one that took it far above its limit."""
    before = cap / 2 if count > 1 and bucket > _LARGE * cap else bucket * (count - 1) / count
    return [before / (count - 1)] * (count - 1) + [bucket - before] if count > 1 else [float(bucket)]


def _around_large_ones(buckets: Sequence[int], cap: float) -> list[float]:
    """Parameters that would fill these buckets so, some of which hold much more than their limit.

    Such a bucket held less than its limit before its last parameter: half of that, as far as one knows. Example: a
    bucket of 64 MiB with a limit of 25 MiB ends with one parameter of 39 to 64 MiB. Other bytes divide anywhere.
    """
    parameters = []
    for bucket in buckets:
        before = cap / 2 if bucket > _LARGE * cap else float(bucket)
        parts = max(round(before / MIB), 1)
        parameters += [before / parts] * parts
        parameters += [bucket - before] if bucket > before else []
    return parameters


def bucket_cap(runs: Mapping[int, RunMetadata]) -> float | None:
    """``bucket_cap_mb`` as the run recorded it."""
    for run in runs.values():
        value = run.settings.get("ddp", {}).get("bucket_cap_mb")
        if isinstance(value, int | float):
            return float(value)
    return None


def _equal_parameters(buckets: Sequence[int], cap: float) -> float | None:
    """The least size of equal parameters that would have filled these buckets so, bytes; None where none would.

    A full bucket holds its limit, and would not without its last parameter. Example: buckets of 8, 32 and 24 MiB are
    one, four and (the rest) three parameters of 8 MiB where the limits are 1 and 25 MiB.
    """
    if len(buckets) < 2:
        return None
    sizes = np.array(buckets, dtype=np.float64)
    # None: the limit is not known, and taken to be what the bucket holds.
    for first, others in ((FIRST_BUCKET, cap), (cap, cap), (FIRST_BUCKET, None)):
        least = sizes[:-1].copy() if others is None else np.full(len(sizes) - 1, others)
        least[0] = first
        if (sizes[:-1] < least * (1 - _WHOLE)).any():
            continue
        size = sizes.min() / _NUMBERS  # a line for each number
        number = sizes / size
        fits = (np.abs(number - np.round(number)) <= _WHOLE).all(axis=1) & (sizes[:-1] - size < least).all(axis=1)
        if fits.any():
            return float(size[int(np.argmax(fits)), 0])
    return None


def bucket_ends(total: float, first: float, cap: float, parameters: Sequence[float] | None) -> list[float]:
    """Bytes reduced once each bucket is; the last is ``total``. Without ``parameters`` bytes divide anywhere."""
    ends: list[float] = []
    held = passed = 0.0
    if parameters is None:
        while passed < total:
            passed = min(passed + (cap if ends else first), total)
            ends.append(passed)
        return ends
    for size in parameters:
        held += size
        passed += size
        if held >= (cap if ends else first):
            ends.append(passed)
            held = 0.0
    if held:
        ends.append(total)
    return ends


def fewer_by_limit(
    runs: Mapping[int, RunMetadata], buckets: Sequence[int], parameters: Sequence[float] | None
) -> int | None:
    """How many buckets the recorded limit would make of these gradients, where that is far fewer than ``buckets``: not
    one backward of one model filled those, and no limit puts what several fill into one bucket. None elsewhere.

    Example: four buckets of 60 kB where the limit is 25 MiB are of several models or backwards; one would do.
    """
    known = bucket_cap(runs)
    if known is None:
        return None
    total = float(sum(buckets))
    cap = limited_share(runs, buckets, parameters) * known * MIB
    would = len(bucket_ends(total, min(FIRST_BUCKET, cap), cap, parameters))
    return would if len(buckets) >= _SEVERAL * would and len(buckets) > would + 1 else None


def bucket_bytes(ends: Sequence[float]) -> list[int]:
    """Bytes of each bucket, by the bytes reduced once each is, as ``bucket_ends`` gives them."""
    sizes: list[int] = np.diff(ends, prepend=0.0).round().astype(np.int64).tolist()
    return sizes


def ready_at(wanted: Float64, total: Float64, ready: Float64, alone: float) -> Float64:
    """Own progress at which each of ``wanted`` bytes of gradients are there, given when each recorded bucket was full:
    ``ready`` at ``total`` bytes.

    Before the first bucket was full, bytes came as fast as in the second. Of one bucket alone only the end is known:
    its bytes came over the share ``alone`` of the progress before that.
    """
    if len(total) == 1:
        return np.asarray(ready[0] * (1 - alone * (1 - wanted / total[0])))
    rate = (ready[1] - ready[0]) / max(total[1] - total[0], 1.0)
    begin = max(0.0, float(ready[0] - rate * total[0]))
    return np.interp(wanted, np.concatenate(([0.0], total)), np.concatenate(([begin], ready)))
