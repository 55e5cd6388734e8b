"""Remote folders, tried against a server that speaks S3 on loopback."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from perfscope.analyzers.analyze import analyze
from perfscope.cli.main import main
from perfscope.errors import PerfscopeError, UnusableInput
from perfscope.recording import remote
from perfscope.recording.job import open_job
from tests.generator import JobSpec, simulate
from tests.recording.faulty_store import Store, faulty
from tests.waiting import free_port


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("job")
    simulate(JobSpec(ranks=2, steps=5)).write(folder)
    return folder


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The address of a server that speaks S3."""
    for name in ("s3fs", "upath"):
        pytest.importorskip(name, reason=f"{name} is not installed (the remote extra, with s3fs)")
    moto = pytest.importorskip("moto.server", reason="moto[server] is not installed")
    port = free_port()
    started = moto.ThreadedMotoServer("127.0.0.1", port, verbose=False)
    started.start()
    yield f"http://127.0.0.1:{port}"
    started.stop()


@pytest.fixture
def store(server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """A client of the server, which also everything else in the test finds through the environment."""
    import s3fs

    monkeypatch.setenv("AWS_ENDPOINT_URL", server)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    s3fs.S3FileSystem.clear_instance_cache()
    files = s3fs.S3FileSystem()
    yield files
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture
def run(store, job, request) -> str:
    """The job's URL."""
    bucket = f"bucket-{abs(hash(request.node.name))}"
    store.mkdir(bucket)
    for path in job.iterdir():
        store.put(str(path), f"{bucket}/runs/one/{path.name}")
    store.invalidate_cache()
    return f"s3://{bucket}/runs/one"


def perfscope(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["analyze", *map(str, arguments)])


def test_the_same_result_as_from_disk(run, job):
    found, expected = analyze(run).to_dict(), analyze(job).to_dict()
    assert found["job"]["ranks"] == (0, 1)
    text = json.dumps(found).replace(run, "FOLDER")
    assert text == json.dumps(expected).replace(str(job), "FOLDER")


def test_the_page_goes_here(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = perfscope(run + "/")
    assert result.exit_code == 0, result.output
    assert result.stdout.rstrip().endswith("report: report.html")
    assert (tmp_path / "report.html").stat().st_size > 100_000


def test_one_file(run, tmp_path):
    assert perfscope(f"{run}/rank1.json.gz", "--output", tmp_path / "page.html").exit_code == 0


def test_in_worker_processes_too(run, tmp_path):
    result = perfscope(run, "--workers", 2, "--output", tmp_path / "page.html", "--json", tmp_path / "s.json")
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "s.json").read_text())["job"]["ranks"] == [0, 1]


def test_nothing_stays_on_disk(run, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    analyze(run, workers=1)
    assert list(tmp_path.iterdir()) == []


def test_the_second_look_fetches_nothing(run, store, tmp_path, monkeypatch):
    monkeypatch.setenv("PERFSCOPE_CACHE", str(tmp_path))
    first = analyze(run)
    with monkeypatch.context() as patch:
        patch.setattr(remote, "fetched", lambda path: pytest.fail("fetched again"))
        assert analyze(run).to_dict() == first.to_dict()
    # A changed object has another mark.
    whole = store.cat(f"{run}/rank1.json.gz")
    store.pipe(f"{run}/rank1.json.gz", whole[: len(whole) // 2])
    store.invalidate_cache()
    assert analyze(run).to_dict() != first.to_dict()


def test_looking_for_traces_fetches_none(run, store, monkeypatch):
    """Object stores read ahead by tens of MB: a look at the first bytes of every file would fetch the job twice."""
    import s3fs

    store.pipe(f"{run}/rank2.json", b'{"traceEvents": []}' + b" " * (1 << 20))
    store.pipe(f"{run}/summary.json", b'{"schema": "perfscope.summary/1"}' + b" " * (1 << 20))
    store.invalidate_cache()
    fetched: list[int] = []
    cat_file = s3fs.S3FileSystem._cat_file

    async def counted(self, *args, **kwargs):
        data = await cat_file(self, *args, **kwargs)
        fetched.append(len(data))
        return data

    monkeypatch.setattr(s3fs.S3FileSystem, "_cat_file", counted)
    monkeypatch.setattr(s3fs.S3FileSystem, "_open", lambda *_, **__: pytest.fail("opened"))
    with remote.opened(run) as folder:
        job = open_job(folder)
    assert [source.path.name for source in job.sources] == ["rank0.json.gz", "rank1.json.gz", "rank2.json"]
    assert sum(fetched) <= 64


def test_a_corrupt_rank_is_named_by_its_url(run, store):
    store.pipe(f"{run}/rank1.json.gz", b"no trace")
    store.invalidate_cache()
    (failure,) = analyze(run).to_dict()["job"]["failures"]
    assert failure["rank"] == 1
    assert f"{run}/rank1.json.gz" in failure["error"]
    assert tempfile.gettempdir() not in failure["error"]


def test_a_rank_that_vanishes_costs_only_itself(run, store, monkeypatch):
    fetched = remote.fetched

    def vanishing(path: Path):
        if path.name.startswith("rank1"):
            store.rm(str(path))
        return fetched(path)

    monkeypatch.setattr(remote, "fetched", vanishing)
    (failure,) = analyze(run, workers=1).to_dict()["job"]["failures"]
    assert "cannot be fetched" in failure["error"]


@pytest.mark.parametrize("place", ["/no/such/folder", ""])
def test_no_such_folder_or_bucket(run, place, tmp_path):
    url = f"s3://{run.split('/')[2]}{place}" if place else "s3://no-such-bucket/runs"
    result = perfscope(url, "--output", tmp_path / "page.html")
    assert result.exit_code == 2
    assert "no such bucket, folder or file" in result.stderr


def test_no_credentials(run, monkeypatch, tmp_path):
    import s3fs

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    s3fs.S3FileSystem.clear_instance_cache()
    result = perfscope(run, "--output", tmp_path / "page.html")
    assert result.exit_code == 2, result.output
    assert "AWS_ACCESS_KEY_ID" in result.stderr


def test_no_server(store, monkeypatch, tmp_path):
    import s3fs

    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(UnusableInput, match=r"s3://bucket/run: cannot be read .*AWS_ENDPOINT_URL"):
        analyze("s3://bucket/run")


@pytest.fixture
def failing(server: str, run: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """A store that fails as the test says, with the job in it."""
    import s3fs

    with faulty(int(server.rpartition(":")[2])) as between:
        monkeypatch.setenv("AWS_ENDPOINT_URL", between.url)
        s3fs.S3FileSystem.clear_instance_cache()
        yield between


@pytest.mark.scale
@pytest.mark.parametrize("kind", ["error", "busy", "closed", "cut", "slow"])
def test_a_store_that_fails_for_a_while_gives_the_same_result(failing, run, job, kind):
    failing.faults = lambda path, number: "" if number else kind
    found = json.dumps(analyze(run, workers=1).to_dict()).replace(run, "FOLDER")
    assert found == json.dumps(analyze(job).to_dict()).replace(str(job), "FOLDER")
    assert failing.done[kind] >= 4


@pytest.mark.scale
@pytest.mark.parametrize("kind", ["error", "busy", "denied", "cut"])
def test_a_trace_that_never_comes_costs_its_rank_and_is_named(failing, run, kind, monkeypatch):
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    failing.faults = lambda path, number: kind if "rank1" in path else ""
    found = analyze(run, workers=1).to_dict()
    (failure,) = found["job"]["failures"]
    assert (failure["rank"], found["job"]["ranks"]) == (1, (0,))
    assert failure["error"].startswith(f"{run}/rank1.json.gz: cannot be fetched (")
    assert "check the network, the credentials" in failure["error"]


@pytest.mark.scale
@pytest.mark.parametrize("kind", ["error", "denied", "closed", "cut"])
def test_a_store_that_always_fails_is_an_error_that_names_the_folder(failing, run, kind, monkeypatch):
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    failing.faults = lambda path, number: kind
    with pytest.raises(UnusableInput, match=rf"{run}: cannot be read .*AWS_ENDPOINT_URL"):
        analyze(run, workers=1)


def test_without_the_extra_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "upath", None)
    with pytest.raises(PerfscopeError, match=r"pip install 'perfscope-profiler\[remote\]'"):
        analyze("s3://bucket/run")


def test_without_the_store_s_package_it_is_named(monkeypatch):
    pytest.importorskip("upath", reason="universal-pathlib is not installed (the remote extra)")
    monkeypatch.setitem(sys.modules, "adlfs", None)
    with pytest.raises(PerfscopeError, match="pip install adlfs"):
        analyze("abfs://container/run")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("s3://b/r", True),
        ("hf://datasets/x", True),
        ("GS://b", True),
        ("traces/", False),
        ("/abs", False),
        ("C:\\t", False),
    ],
)
def test_what_is_a_url(text, expected):
    assert remote.is_url(text) is expected
