"""Planted causes: is each found, is the gain of its cure predicted, and does the cure bring that gain?

The recording is of the planted setup alone. Then, without a profiler, the planted and the cured setup take turns in one
process. A predicted range must hold the measured step time; a ceiling must lie above the measured gain. What
channels last and a larger batch bring beyond what is replayed is not predicted: there the measured step may be shorter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from tests.gpu.models import again_by_hand
from tests.gpu.points import Point, between, near, says, skipped
from tests.gpu.recorded import Place, Run, in_turn, must, train
from tests.gpu.setups import Setup

CEILING_NOISE = 0.03
"""By how much a measured gain may exceed a ceiling."""


@dataclass(frozen=True)
class Scene:
    """A planted cause, its cure, and the rules that may speak of it."""

    name: str
    planted: Setup
    cure: dict[str, Any]
    rules: tuple[str, ...]
    on_cpu: bool = False
    """Does a CPU have this cause, too?"""
    needs: str = ""
    """What the cure needs besides torch."""
    ranks: int = 0
    """So many gloo ranks, which share a device; 0: one process without torch.distributed."""

    @property
    def job(self) -> tuple[str, ...]:
        """Options of the training."""
        return ("--backend", "gloo", "--share") if self.ranks else ()

    def cured(self, finding: dict[str, Any] | None) -> dict[str, Any]:
        """What to change: the workers that the finding advises, else the scene's cure."""
        if finding and finding["rule"] in LOADER and str(finding["action"]["to"]).isdecimal():
            return {"workers": int(finding["action"]["to"])}
        return self.cure


LOADER = ("dataloader-workers",)
ENDS = ("low", "high")
AT_LEAST = ("channels-last", "batch-size")
"""Rules whose prediction leaves out what else the change may bring: other kernels, a device that is used better."""
COMPILED = {"compile": "reduce-overhead"}
PRECISION = ("mixed-precision",)
SMALL = Setup(model="small", layers=64, width=256, batch=16, context=32, precision="fp32")
MEDIUM = Setup(layers=12, width=512, batch=8, context=256)
IMAGES = Setup(model="conv", layers=3, batch=64, context=112, precision="bf16", workers=4)
PAGEABLE = replace(IMAGES, layers=1, context=224, pinned=False)

CHECKPOINTED = Setup(checkpoint=True, layers=4, count_flops=True)
MANY = Setup(
    strategy="ddp", layers=2, width=384, batch=1, context=32, workers=0, pinned=False, precision="fp32",
    optimizer="foreach", fitted=True,
)  # fmt: skip
"""More bytes of gradients than work, on any device."""

SCENES = (
    Scene("slow loader", Setup(load_ms=60.0, workers=0, layers=4), {"workers": 4}, LOADER, on_cpu=True),
    Scene("bound by launches", SMALL, COMPILED, ("launch-bound",), needs="a C++ compiler and Triton"),
    Scene("values read in the forward", replace(MEDIUM, reads=12), {"reads": 0}, ("host-syncs",)),
    Scene(
        "optimizer one parameter at a time", replace(MEDIUM, layers=24, optimizer="for-loop"), {"optimizer": "fused"},
        ("launch-bound", "optimizer-kernels"),
    ),
    Scene("float32", Setup(precision="fp32", layers=4), {"precision": "bf16"}, PRECISION),
    Scene("float32, TF32 off", Setup(precision="fp32", layers=4), {"precision": "tf32"}, PRECISION),
    Scene("TF32", Setup(precision="tf32", layers=4), {"precision": "bf16"}, PRECISION),
    Scene("pageable batches", PAGEABLE, {"pinned": True}, ("pinned-memory",)),
    Scene("channels first", IMAGES, {"channels_last": True}, ("channels-last",)),
    Scene(
        "activations computed again", CHECKPOINTED, {"checkpoint": False}, ("activation-checkpointing",), on_cpu=True
    ),
    Scene("small batches", MANY, {"batch": 2 * MANY.batch}, ("batch-size",), on_cpu=True, ranks=2),
)  # fmt: skip


def checks(place: Place) -> Iterator[Point]:
    """All scenes; where one fails to run the others go on."""
    for scene in SCENES:
        if not place.on_gpu and not scene.on_cpu:
            yield skipped("changes", scene.name, "its cause needs a GPU")
            continue
        try:
            yield from _scene(place, scene)
        except RuntimeError as failure:
            needed = f" (needs {scene.needs})" if scene.needs else ""
            yield Point("changes", f"{scene.name}{needed}", "runs", str(failure)[-300:], holds=False)


def _scene(place: Place, scene: Scene) -> Iterator[Point]:
    name = scene.name.replace(" ", "-").replace(",", "")
    run = must(train(place, name, [scene.planted], record=(), ranks=scene.ranks, job=scene.job))
    finding = run.finding(*scene.rules)
    cure = scene.cured(finding)
    # On a CPU all setups are as small as each other, but for what the cure changes.
    planted = place.fit(scene.planted)
    cured = replace(planted, **({"batch": 2 * planted.batch} if "batch" in cure else cure))
    before, after = in_turn(place, f"{name}-cured", planted, cured, ranks=scene.ranks, job=scene.job)
    after *= planted.batch / cured.batch  # of as many samples
    gain, change = before / after - 1, ", ".join(f"{name}={value}" for name, value in cure.items())
    measured = f"{before:.2f} -> {after:.2f} ms ({gain:+.0%}) by {change}"
    if scene.planted.checkpoint:
        yield _recomputed(place, run)
    if finding is None:
        # Silence is right where the cure brings less than what rules fire at.
        fired = ", ".join(one["rule"] for one in run.summary["findings"]) or "no finding"
        expected = f"{' or '.join(scene.rules)} where it brings 5 %; {measured}"
        yield says("changes", scene.name, expected, fired, holds=gain < 0.05)
        return
    yield says("changes", f"{scene.name}: found", " or ".join(scene.rules), finding["title"], holds=True)
    yield _judged(f"{scene.name}: {change}", run, finding, before, after)


def _judged(what: str, run: Run, finding: dict[str, Any], before: float, after: float) -> Point:
    """The finding's prediction, or its ceiling, beside what was measured."""
    predicted = finding["predicted_step_us"]
    if predicted is not None:
        recorded = run.summary["job"]["unprofiled_step_us"] or run.summary["job"]["step_time_us"]
        # The profiler lengthens operators, and neither sleeping nor sending: the same time is saved, or the same share.
        ways = [(predicted[end] * before / recorded, before - (recorded - predicted[end]) / 1e3) for end in ENDS]
        low, high = min(ways[0]), max(ways[1])
        low = 0.0 if finding["rule"] in AT_LEAST else low
        return between("changes", f"{what} (predicted range)", low, after, high, " ms")
    if finding["ceiling"] is None:
        return says("changes", what, "a prediction or a ceiling", "neither", holds=False)
    gain, most = before / after - 1, finding["ceiling"] + CEILING_NOISE
    return between("changes", f"{what} (ceiling)", -CEILING_NOISE, gain, most)


def _recomputed(place: Place, run: Run) -> Point:
    """With checkpointing every block's forward runs twice, up to its last product: that saves its input, and stops."""
    found = run.summary["utilisation"]["hardware_flops_per_step"]
    if place.on_gpu:
        return near("MFU", "FLOPs with recomputation", run.truths[0]["flops"][0], found, 0.04)
    # torch's counter leaves out attention on CPUs.
    return near("MFU", "FLOPs with recomputation", again_by_hand(place.fit(CHECKPOINTED)), found, 0.02)
