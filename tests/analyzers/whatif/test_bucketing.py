"""How DistributedDataParallel fills buckets, and what recorded buckets show of the parameters in them."""

from __future__ import annotations

import pytest

from perfscope.analyzers.whatif.bucketing import (
    MIB,
    bucket_ends,
    fewer_by_limit,
    limited_share,
    limits,
    parameter_bytes,
    sent_share,
)
from perfscope.analyzers.whatif.ddp import several_messages
from perfscope.recording.metadata import ModelMetadata, RunMetadata


@pytest.mark.parametrize(
    ("buckets", "size"),
    [
        ((8, 32, 32, 24), 8.0),  # limits of 1 and 25 MiB: one, four, four and the rest
        ((8, 8, 8), 8.0),  # each parameter is more than any limit
        ((30, 30, 20), 10.0),  # limits of 25 MiB alone
        ((1, 25, 25, 13), 0.0),  # filled to the brim: parameters are small
        ((7, 29, 31, 11), None),  # of unlike sizes
        ((32,), None),
    ],
)
def test_equal_parameters_show_in_the_buckets(buckets: tuple[int, ...], size: float | None) -> None:
    found = parameter_bytes({}, [bucket * MIB for bucket in buckets])
    if size is None:
        assert found is None
    else:
        assert found is not None
        sizes, recorded = found
        assert not recorded
        assert sum(sizes) == pytest.approx(sum(buckets) * MIB)
        assert max(sizes) / MIB == pytest.approx(size, abs=0.02)


def test_recorded_sizes_come_first_and_in_the_order_of_the_backward() -> None:
    model = ModelMetadata(trainable_sizes=(6 * MIB, 2 * MIB, 8 * MIB))
    found = parameter_bytes({0: RunMetadata(rank=0, model=model)}, [8 * MIB, 8 * MIB])
    assert found == ([8 * MIB, 2 * MIB, 6 * MIB], True)


def test_the_recorded_limit_counts() -> None:
    run = RunMetadata(rank=0, settings={"ddp": {"bucket_cap_mb": 45}})
    found = parameter_bytes({0: run}, [50 * MIB, 50 * MIB, 30 * MIB])
    assert found is not None
    assert max(found[0]) == pytest.approx(10 * MIB)


@pytest.mark.parametrize(
    "run",
    [
        RunMetadata(rank=0, model=ModelMetadata(trainable_sizes=(20 * MIB, 20 * MIB, 20 * MIB))),
        RunMetadata(rank=0, settings={"ddp": {"comm_hook": "bf16_compress_hook"}}),
    ],
)
def test_limits_count_gradients_and_not_what_a_hook_sends_of_them(run: RunMetadata) -> None:
    """Gradients of 60 MiB are sent as 30: a bucket of 25 MiB holds two of three parameters of 20."""
    runs, sent = {0: run}, [20 * MIB, 10 * MIB]
    share = sent_share(runs, sum(sent))
    first, other = limits(runs, 25.0 * MIB, share)
    assert (share, first, other) == (0.5, 12.5 * MIB, 12.5 * MIB)
    if run.model is not None:
        found = parameter_bytes(runs, sent)
        assert found == ([10 * MIB] * 3, True)
        assert bucket_ends(30 * MIB, first, other, found[0]) == [20 * MIB, 30 * MIB]
    assert sent_share(runs, 60 * MIB) == (1.0 if run.model is not None else 0.5)


@pytest.mark.parametrize(
    ("sent", "share"),
    [
        # With a limit of 25 MiB for what is sent the first two of parameters of 10 MiB do not fill a bucket.
        ((30, 30), 1.0),
        # Half of 25 MiB is the limit of what is sent of them, or 1 and 12.5 MiB.
        ((20, 20, 20), 0.5),
        ((10, 20, 20, 10), 0.5),
        # Neither makes these.
        ((60,), 0.5),
    ],
)
def test_recorded_buckets_tell_whether_limits_count_what_is_sent(sent: tuple[int, ...], share: float) -> None:
    """The model holds 120 MiB, of which 60 are sent: by a hook, or because its gradients are of 16 bits."""
    run = RunMetadata(
        rank=0,
        model=ModelMetadata(trainable_sizes=(20 * MIB,) * 6),
        settings={"ddp": {"bucket_cap_mb": 25}},
    )
    buckets = [size * MIB for size in sent]
    found = parameter_bytes({0: run}, buckets)
    assert found is not None
    assert limited_share({0: run}, buckets, found[0]) == share


def test_a_bucket_is_full_once_it_holds_its_limit() -> None:
    assert bucket_ends(40, 1, 10, [8, 8, 8, 8, 8]) == [8, 24, 40]
    assert bucket_ends(40, 10, 10, [8, 8, 8, 8, 8]) == [16, 32, 40]
    assert bucket_ends(40, 1, 25, None) == [1, 26, 40]


@pytest.mark.parametrize(("version", "first"), [("2.4.1+cu121", 1), ("2.5.0", 10), ("2.13.0a0+git1", 10), ("?", 10)])
def test_the_first_limit_follows_the_set_one_since_torch_2_5(version: str, first: int) -> None:
    run = RunMetadata(rank=0, versions={"torch": version})
    assert limits({0: run}, 10.0 * MIB) == (first * MIB, 10 * MIB)
    assert limits({}, 10.0 * MIB) == (10 * MIB, 10 * MIB)


def test_a_bucket_far_over_its_limit_ends_with_a_large_parameter() -> None:
    """64 MiB, where 25 are the limit, were less than 25 before the last parameter; the rest shows no equal ones."""
    sizes, recorded = parameter_bytes({}, [64 * MIB, 64 * MIB, 8192]) or ([], True)
    assert not recorded
    assert sum(sizes) == pytest.approx(128 * MIB + 8192)
    assert [size / MIB for size in sizes if size > 5 * MIB] == [51.5, 51.5]


@pytest.mark.parametrize(
    ("cap", "buckets", "fewer"),
    [
        (25, [60_000] * 4, 1),  # two models, one of them in three backwards
        (25, [60_000, 60_000], None),  # two data types
        (0.05, [60_000] * 4, None),  # what the limit makes
        (None, [60_000] * 4, None),  # not known
        (25, [MIB, 25 * MIB, 25 * MIB, 10 * MIB], None),
    ],
)
def test_buckets_far_below_their_limit_are_of_several_models(
    cap: float | None, buckets: list[int], fewer: int | None
) -> None:
    run = RunMetadata(rank=0, settings={} if cap is None else {"ddp": {"bucket_cap_mb": cap}})
    assert fewer_by_limit({0: run}, buckets, None) == fewer


@pytest.mark.parametrize(
    ("gradients", "several"),
    [
        ((8, 0, 4, 0, 4, 0), True),  # PowerSGD's two factors of each bucket
        ((8, 0, 0, 4, 0, 0), True),
        ((8, 4, 4), False),
        ((16, 0, 0), False),  # the first bucket was ready last: all are reduced then
        ((8, 0, 4, 4), False),
        ((0, 8, 4), False),
        ((), False),
    ],
)
def test_a_hook_that_reduces_more_than_once_for_each_bucket(gradients: tuple[int, ...], *, several: bool) -> None:
    """By the gradients that were ready since the all-reduce before each."""
    assert several_messages(gradients) is several
