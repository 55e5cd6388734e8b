"""Secrets planted wherever a job may carry them are in no file that is written, and in nothing that is shown."""

from __future__ import annotations

import base64
import gzip
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from perfscope.analyzers.analyze import analyze
from perfscope.recording.paths import trace_file
from perfscope.reports import terminal
from perfscope.reports.page import page
from tests.collectors.harness import PERFSCOPE, SCRIPTS, SHORT, needs_torch, record

pytestmark = [pytest.mark.training, needs_torch]

CANARY = "9fQ2canary7Zr4Lw8Xk3Vb6Nd1"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
ARGUMENTS = (
    "--canary", f"hf_{CANARY}", f"--canary=sk-{CANARY}", "--hf-token", CANARY, f"--password={CANARY}",
    f"wandb.api_key={CANARY}", f"--store=AccountName=me;AccountKey={CANARY}==", f"s3://me:{CANARY}@bucket/data",
    f"https://hooks.slack.com/services/T/B/{CANARY}", f"https://host/x?sig={CANARY}&y=1",
    f'--json={{"hub": {{"access_token": "{CANARY}"}}}}', f"--header=Authorization: Bearer {CANARY}",
)  # fmt: skip
ENVIRONMENT = {
    "CANARY": CANARY,
    "HF_TOKEN": f"hf_{CANARY}",
    "WANDB_API_KEY": CANARY,
    "NCCL_AUTH_TOKEN": CANARY,
    "DS_CONFIG": f'{{"wandb": {{"api_key": "{CANARY}"}}}}',
    "TORCH_PROXY": f"http://me:{CANARY}@proxy",
    "FSDP_STORE": f"DefaultEndpointsProtocol=https;AccountKey={CANARY};x=y",
    "ACCELERATE_HUB": f"ghp_{CANARY}",
}
FORMS = (
    "hf_{}", "sk-{}", "ghp_{}", "https://me:{}@host/x", "https://hooks.slack.com/services/T/B/{}",
    "https://bucket/key?X-Amz-Signature={}&x=1", "https://host/x?sig={}&y=1", "AccountName=me;AccountKey={}==;x=y",
    '{"api_key": "{}"}', "Authorization: Bearer {}", "--password={}", "token={}",
)  # fmt: skip
"""What a secret stands in, wherever there is a text."""
TRAINING = """
import torch

model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters())
for _ in range(20):
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
_PACKED = re.compile(rb"[A-Za-z0-9+/]{60,}={0,2}")


def forms(data: bytes) -> Iterator[bytes]:
    """A file's bytes, unpacked, and what is packed within a page."""
    if data[:2] == b"\x1f\x8b":
        data = gzip.decompress(data)
    yield data
    for packed in _PACKED.findall(data):
        whole = base64.b64decode(packed[: len(packed) // 4 * 4])
        if whole[:2] == b"\x1f\x8b":
            yield from forms(whole)


def where(folder: Path) -> list[str]:
    """The files that hold the secret, with what is around it."""
    found = []
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        for data in forms(path.read_bytes()):
            for place in re.finditer(CANARY.encode(), data):
                around = data[max(place.start() - 60, 0) : place.end() + 20]
                found.append(f"{path.name}: {around.decode(errors='replace')}")
    return found


def test_no_secret_of_a_job_is_written_or_shown(tmp_path: Path) -> None:
    folder = tmp_path / "recording"
    script = str(SCRIPTS / "secretive.py")
    arguments = (*ARGUMENTS, *(form.replace("{}", f"{CANARY}argument{at}") for at, form in enumerate(FORMS)))
    environment = {f"FSDP_{at}": form.replace("{}", f"{CANARY}variable{at}") for at, form in enumerate(FORMS)}
    environment |= {"FORMS": json.dumps(FORMS), **ENVIRONMENT}
    recording = record(folder, *TORCHRUN, script, *arguments, options=SHORT, environment=environment)
    assert recording.exit_code == 1
    assert "upload failed" in recording.err  # the job's own output is its own
    assert CANARY not in recording.messages
    # Kineto writes names as they are, quotation marks too: no JSON.
    trace = gzip.decompress(trace_file(folder, 0, 0).read_bytes())
    assert b"ProfilerStep#2" in trace
    assert trace.count(b'"fetch ') >= 2 * len(FORMS)
    assert where(folder) == []
    assert analyze(folder).job.steps == (2, 3)
    written = tmp_path / "written"
    written.mkdir()
    answers = (
        ("analyze", str(folder), "--output", str(written / "page.html"), "--json", str(written / "page.json")),
        ("merge", str(folder), "--output", str(written / "merged.json.gz")),
        ("compare", str(folder), str(folder), "--output", str(written / "compare.html")),
    )
    for arguments in answers:
        ran = subprocess.run([*PERFSCOPE, *arguments], capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stderr
        assert CANARY not in ran.stdout + ran.stderr
    assert len(list(written.iterdir())) >= 3
    assert where(written) == []


def test_secrets_in_paths_and_in_a_framework_s_file_are_neither(tmp_path: Path) -> None:
    code = tmp_path / f"code-hf_{CANARY}" / f"token={CANARY}"
    code.mkdir(parents=True)
    script = code / "train.py"
    script.write_text(TRAINING)
    settings = code / "ds_config.json"
    settings.write_text(json.dumps({"train_batch_size": 4, "wandb": {"api_key": CANARY, "project": f"hf_{CANARY}"}}))
    folder = tmp_path / f"out-hf_{CANARY}" / f"api_key={CANARY}" / "recording"
    folder.parent.mkdir(parents=True)
    deepspeed = ("--deepspeed", str(settings), f"--config_file={settings}")
    recording = record(folder, sys.executable, str(script), *deepspeed, options=(*SHORT, "--stacks"))
    assert b"traceName" in gzip.decompress(trace_file(recording.folder, 0, 0).read_bytes())
    (folder / ".bootstrap" / "config.json").unlink()  # where the ranks are told the path
    assert where(folder) == []
    found = analyze(folder)
    written = tmp_path / "written"
    written.mkdir()
    (written / "page.html").write_text(page.render(found))
    (written / "summary.json").write_text(json.dumps(found.to_dict()))
    (written / "text.txt").write_text(terminal.verdict(found))
    assert where(written) == []
