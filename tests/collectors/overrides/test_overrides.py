"""What ``perfscope tune`` applies inside a rank: on real loaders and models, and undone at the end."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from perfscope.collectors.overrides import stop as overrides_stop
from perfscope.collectors.overrides.deepspeed import with_values
from perfscope.collectors.overrides.log import Log
from perfscope.collectors.overrides.overrides import (
    DATALOADER,
    OVERRIDES_FILE,
    Overrides,
    install_deepspeed,
    install_torch,
)
from perfscope.collectors.patches import Patches
from perfscope.recording.paths import BOOTSTRAP_FOLDER
from tests.collectors.harness import needs_torch

torch = pytest.importorskip("torch")
dist = torch.distributed
DataLoader, TensorDataset = torch.utils.data.DataLoader, torch.utils.data.TensorDataset
DDP = torch.nn.parallel.DistributedDataParallel

pytestmark = needs_torch


class Applied:
    """Overrides in force in this process, and their log."""

    def __init__(self) -> None:
        self.patches = Patches()
        self.log = Log()

    def __call__(self, *, microbatches: int = 1, datasets: tuple[str, ...] = (), **settings: Any) -> Log:
        named = {name.replace("__", "."): value for name, value in settings.items()}
        install_torch(Overrides(settings=named, microbatches=microbatches, datasets=datasets), self.patches, self.log)
        return self.log


@pytest.fixture
def applied() -> Iterator[Applied]:
    """Puts the originals back afterwards, as the end of a rank does."""
    originals = DataLoader.__init__, DDP.__init__, torch.autograd.backward
    from torch.optim.optimizer import _global_optimizer_pre_hooks as hooks

    held = dict(hooks)
    found = Applied()
    yield found
    found.patches.restore()
    hooks.clear()
    hooks.update(held)
    assert (DataLoader.__init__, DDP.__init__, torch.autograd.backward) == originals


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A process group of one rank."""
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _items(count: int = 12) -> Any:
    return TensorDataset(torch.arange(count, dtype=torch.float32))


def _batches(loader: Any) -> list[list[float]]:
    return [batch[0].tolist() for batch in loader]


def test_workers_are_added_and_batches_stay_the_same(applied: Applied) -> None:
    torch.manual_seed(3)
    before = _batches(DataLoader(_items(), 4, True))
    log = applied(dataloader__num_workers=2, dataloader__prefetch_factor=3, dataloader__persistent_workers=True)
    torch.manual_seed(3)
    loader = DataLoader(_items(), 4, True)
    assert (loader.num_workers, loader.prefetch_factor, loader.persistent_workers) == (2, 3, True)
    assert _batches(loader) == before
    assert log.as_dict()["dataloader.num_workers"] == {"from": 0, "to": 2, "times": 1, "refused": ""}


def test_workers_are_taken_away_with_all_that_needs_them(applied: Applied) -> None:
    applied(dataloader__num_workers=0)
    loader = DataLoader(_items(), num_workers=2, prefetch_factor=4, persistent_workers=True, timeout=5)
    assert (loader.num_workers, loader.prefetch_factor, loader.persistent_workers, loader.timeout) == (
        0,
        None,
        False,
        0,
    )


def test_what_needs_workers_is_refused_without_any(applied: Applied) -> None:
    log = applied(dataloader__prefetch_factor=4)
    assert DataLoader(_items()).prefetch_factor is None
    assert "num_workers" in log.as_dict()["dataloader.prefetch_factor"]["refused"]


def test_a_stream_is_never_delivered_twice(applied: Applied) -> None:
    class Stream(torch.utils.data.IterableDataset):  # type: ignore[misc,name-defined]
        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

    log = applied(dataloader__num_workers=2)
    assert DataLoader(Stream()).num_workers == 0
    assert "iterable" in log.as_dict()["dataloader.num_workers"]["refused"]
    assert DataLoader(Stream(), num_workers=4).num_workers == 2, "its dataset shares the stream out already"


def test_other_datasets_keep_their_loaders(applied: Applied) -> None:
    applied(dataloader__num_workers=2, datasets=("Other",))
    assert DataLoader(_items()).num_workers == 0


def test_a_value_that_torch_refuses_leaves_the_scripts(applied: Applied) -> None:
    log = applied(dataloader__num_workers=-1)
    assert _batches(DataLoader(_items(2), batch_size=2)) == [[0.0, 1.0]]
    assert "num_workers" in log.as_dict()["dataloader.num_workers"]["refused"]
    assert log.as_dict()["dataloader.num_workers"]["times"] == 0


def test_the_scripts_own_mistakes_stay_its_own(applied: Applied) -> None:
    applied(dataloader__num_workers=1, ddp__bucket_cap_mb=1)
    with pytest.raises(TypeError, match="no_such"):
        DataLoader(_items(), no_such=1)
    with pytest.raises(TypeError, match="no_such"):
        DDP(no_such=1)


def test_nothing_to_change_changes_nothing(applied: Applied) -> None:
    original = DataLoader.__init__
    applied(ddp__bucket_cap_mb=1)
    assert DataLoader.__init__ is original


def _model() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))


def test_ddp_takes_its_arguments(applied: Applied, alone: None) -> None:
    log = applied(ddp__bucket_cap_mb=4, ddp__gradient_as_bucket_view=True, ddp__static_graph=True)
    model = DDP(_model())
    assert (model.bucket_bytes_cap >> 20, model.gradient_as_bucket_view, model.static_graph) == (4, True, True)
    assert log.as_dict()["ddp.bucket_cap_mb"] == {"from": 25, "to": 4, "times": 1, "refused": ""}


def test_ddp_stops_looking_for_unused_parameters(applied: Applied, alone: None) -> None:
    log = applied(ddp__find_unused_parameters=False)
    assert DDP(_model(), find_unused_parameters=True).find_unused_parameters is False
    assert log.as_dict()["ddp.find_unused_parameters"]["from"] is True


def test_a_ddp_that_cannot_be_made_so_is_made_as_the_script_has_it(applied: Applied, alone: None) -> None:
    log = applied(ddp__bucket_cap_mb="much")
    assert DDP(_model(), bucket_cap_mb=7).bucket_bytes_cap >> 20 == 7
    assert log.as_dict()["ddp.bucket_cap_mb"]["refused"]


def test_gradients_travel_in_bf16_when_asked_to(applied: Applied, alone: None) -> None:
    x = torch.linspace(-1, 1, 16).reshape(2, 8)
    plain = DDP(_model())
    plain(x).square().mean().backward()
    log = applied(ddp__comm_dtype="bf16")
    model = DDP(_model())
    model(x).square().mean().backward()
    assert log.as_dict()["ddp.comm_dtype"]["to"] == "bf16"
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad.bfloat16().float())


def test_a_hook_of_the_scripts_comes_first(applied: Applied, alone: None) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    log = applied(ddp__comm_dtype="bf16")
    model = DDP(_model())
    model.register_comm_hook(None, allreduce_hook)
    model(torch.ones(2, 8)).sum().backward()
    assert "hook of its own" in log.as_dict()["ddp.comm_dtype"]["refused"]


def _syncs(applied: Applied, pattern: str, microbatches: int = 3, **ddp: Any) -> tuple[list[bool], Log]:
    """For each forward, whether its backward is to exchange gradients; F, B and S are what the script does, N a forward
    without gradients."""
    log = applied(ddp__no_sync=True, microbatches=microbatches)
    seen: list[bool] = []

    class Watched(DDP):  # type: ignore[misc,valid-type]
        def forward(self, *inputs: Any) -> Any:
            seen.append(self.require_backward_grad_sync)
            return super().forward(*inputs)

    model = Watched(_model(), **ddp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    outputs: list[Any] = []
    for event in pattern:
        if event == "F":
            outputs.append(model(torch.ones(2, 8)).mean())
        elif event == "N":
            with torch.no_grad():
                model(torch.ones(2, 8))
        elif event == "B":
            sum(outputs).backward()
            outputs.clear()
        else:
            optimizer.step()
            optimizer.zero_grad()
        assert model.require_backward_grad_sync, "it is only ever off during a forward"
    return seen, log


def test_gradients_are_exchanged_after_the_last_micro_batch(applied: Applied, alone: None) -> None:
    seen, log = _syncs(applied, "FBFBFBS" * 2)
    assert seen == [False, False, True] * 2
    assert log.as_dict()["ddp.no_sync"]["refused"] == ""


def test_an_evaluation_between_micro_batches_does_not_count(applied: Applied, alone: None) -> None:
    assert _syncs(applied, "FBNNFBFBS")[0] == [False, True, True, False, True]


def test_fewer_micro_batches_are_noticed_and_end_it(applied: Applied, alone: None) -> None:
    seen, log = _syncs(applied, "FBFBS" + "FBFBFBS")
    assert seen == [False, False, True, True, True]
    assert "not the same in every step" in log.as_dict()["ddp.no_sync"]["refused"]


def test_several_forwards_to_one_backward_end_it(applied: Applied, alone: None) -> None:
    seen, log = _syncs(applied, "FFBS" + "FBS")
    assert seen == [False, True, True]
    assert "several times" in log.as_dict()["ddp.no_sync"]["refused"]


def test_unused_parameters_do_not_go_with_it(applied: Applied, alone: None) -> None:
    seen, log = _syncs(applied, "FBFBFBS", find_unused_parameters=True)
    assert seen == [True, True, True]
    assert "find_unused_parameters" in log.as_dict()["ddp.no_sync"]["refused"]


def test_deepspeeds_json_is_changed_by_its_paths() -> None:
    theirs = {"zero_optimization": {"stage": 2}, "fp16": {"enabled": False}}
    values = {"zero_optimization.overlap_comm": True, "zero_optimization.stage": 1, "aio.threads": 2}
    changed, old = with_values(theirs, values)
    assert changed == {
        "zero_optimization": {"stage": 1, "overlap_comm": True}, "fp16": {"enabled": False}, "aio": {"threads": 2},
    }  # fmt: skip
    assert old == {"zero_optimization.overlap_comm": None, "zero_optimization.stage": 2, "aio.threads": None}
    assert theirs == {"zero_optimization": {"stage": 2}, "fp16": {"enabled": False}}
    with pytest.raises(ValueError, match="no object"):
        with_values({"a": 1}, {"a.b": 2})


class _Config:
    """Stands in for DeepSpeed's: refuses what it does not know."""

    def __init__(self, config: Any, mpu: Any = None) -> None:
        content = config if isinstance(config, dict) else json.loads(Path(config).read_text())
        if content.get("bad"):
            raise ValueError("bad is not known")
        self.content, self.mpu = content, mpu


@pytest.mark.parametrize("as_file", [True, False])
def test_deepspeed_reads_the_changed_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_file: bool
) -> None:
    module = types.ModuleType("deepspeed.runtime.config")
    kind = type("DeepSpeedConfig", (), {"__init__": _Config.__init__})
    module.DeepSpeedConfig = kind  # type: ignore[attr-defined]
    for name in ("deepspeed", "deepspeed.runtime"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "deepspeed.runtime.config", module)
    given: Any = {"zero_optimization": {"stage": 1}}
    if as_file:
        (tmp_path / "ds.json").write_text(json.dumps(given))
        given = str(tmp_path / "ds.json")
    patches, log = Patches(), Log()
    install_deepspeed(Overrides(settings={"deepspeed.zero_optimization.overlap_comm": True}), patches, log)
    made: Any = kind(given, mpu=5)  # type: ignore[call-arg]
    assert made.content == {"zero_optimization": {"stage": 1, "overlap_comm": True}}
    assert made.mpu == 5
    patches.restore()
    install_deepspeed(Overrides(settings={"deepspeed.bad": True}), patches, log)
    assert kind(given).content == {"zero_optimization": {"stage": 1}}  # type: ignore[call-arg]
    assert "bad is not known" in log.as_dict()["deepspeed.bad"]["refused"]
    patches.restore()


def test_overrides_travel_in_a_file(tmp_path: Path) -> None:
    wanted = Overrides(
        settings={"dataloader.num_workers": 2}, environment={"A": "1", "B": None}, datasets=("D",), microbatches=4
    )
    wanted.save(tmp_path)
    assert Overrides.load(tmp_path) == wanted
    assert wanted.of(DATALOADER) == {"num_workers": 2}
    assert (tmp_path / OVERRIDES_FILE).is_file()


def test_ranks_leave_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / BOOTSTRAP_FOLDER).mkdir()
    (tmp_path / BOOTSTRAP_FOLDER / "stopped-1").touch()
    waits: list[float] = []
    monkeypatch.setattr(overrides_stop.time, "sleep", waits.append)
    with pytest.raises(SystemExit) as left:
        overrides_stop.end_training(tmp_path, 0, 2)
    assert left.value.code == 0
    assert overrides_stop.stopped(tmp_path) == {0, 1}
    assert waits == [], "nobody to wait for"


def test_a_rank_that_does_not_come_is_not_waited_for_forever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / BOOTSTRAP_FOLDER).mkdir()
    monkeypatch.setattr(overrides_stop, "PATIENCE_S", 0.05)
    with pytest.raises(SystemExit):
        overrides_stop.end_training(tmp_path, 0, 2)
