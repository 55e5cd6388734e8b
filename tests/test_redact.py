"""Secrets in arguments and environment variables are redacted; what affects performance is recorded."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from perfscope.redact import REDACTED, performance_environment, redact_command, redact_names, redacted_trace


@pytest.mark.parametrize(
    ("argument", "recorded"),
    [
        ("--token=abcdef", f"--token={REDACTED}"),
        ("--hf-token=abcdef", f"--hf-token={REDACTED}"),
        ("wandb.api_key=0123456789abcdef", f"wandb.api_key={REDACTED}"),
        ("WANDB_API_KEY=0123456789abcdef", f"WANDB_API_KEY={REDACTED}"),
        ("--dbPassword=hunter2", f"--dbPassword={REDACTED}"),
        ("s3://user:hunter2@host/data", f"s3://{REDACTED}@host/data"),
        ("hf_AbCdEfGhIjKlMnOpQrSt", REDACTED),
        ("https://hooks.slack.com/services/T01/B02/hunter2", f"https://hooks.slack.com/{REDACTED}"),
        ("https://discord.com/api/webhooks/123/hunter2", f"https://discord.com/api/webhooks/{REDACTED}"),
        ("s3://b/k?X-Amz-Signature=hunter2&x=1", f"s3://b/k?X-Amz-Signature={REDACTED}"),
        (
            "https://a.blob.core.windows.net/c?sv=1&sig=hun%2Bter2",
            f"https://a.blob.core.windows.net/c?sv=1&sig={REDACTED}",
        ),
        ("--store=AccountName=me;AccountKey=hunter2==;x=y", f"--store=AccountName=me;AccountKey={REDACTED};x=y"),
        ('{"wandb": {"api_key": "hunter2", "lr": 3}}', f'{{"wandb": {{"api_key": "{REDACTED}", "lr": 3}}}}'),
        ("Authorization: Bearer hunter2hunter2", f"Authorization: Bearer {REDACTED}"),
        ("--note=uses hf_AbCdEfGhIjKlMnOpQrSt", f"--note=uses {REDACTED}"),
    ],
)
def test_secrets_are_redacted(argument: str, recorded: str) -> None:
    assert redact_command(["python", argument]) == ("python", recorded)


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("fetch --password=hunter2hunter2", f"fetch --password={REDACTED}"),
        ("token=hunter2hunter2", f"token={REDACTED}"),
        ("AccountName=me;AccountKey=hunter2hunter2==;x=y", f"AccountName=me;AccountKey={REDACTED};x=y"),
        ('get {"api_key": "hunter2hunter2"}', f'get {{"api_key": "{REDACTED}"}}'),
        ('get {/"api_key/": /"hunter2hunter2/"}', f'get {{/"api_key/": /"{REDACTED}"}}'),  # as kineto makes it
        ("name=token=hunter2hunter2", f"name=token={REDACTED}"),
        ('{/"Authorization/" : /"hunter2hunter2/"}', f'{{/"Authorization/" : /"{REDACTED}"}}'),
        ("void kernel<Key=uint64_t, token=3>(float*)", None),
        ("pass 3: key=4, tokens=1000000000", None),
    ],
)
def test_pairs_in_names(name: str, shown: str | None) -> None:
    assert redact_names((name, "aten::mm")) == (shown or name, "aten::mm")
    line = f'"cat": "user_annotation", "name": "{name}", "ts": 1'.encode()  # kineto escapes nothing
    assert b"".join(redacted_trace(io.BytesIO(line), 64)) == line.replace(name.encode(), (shown or name).encode())


@pytest.mark.parametrize("secret", ["hf_AbCdEfGhIjKlMnOpQrSt", "token=AbCdEfGhIjKl"])
def test_the_path_of_a_trace_is_its_name(secret: str) -> None:
    written = f'{{"traceEvents": [\n  {{"ph": "X", "name": "a"}}\n],"traceName": "/home/{secret}/rank0.json"\n}}\n'
    found = b"".join(redacted_trace(io.BytesIO(written.encode()), 64))
    assert secret[-12:].encode() not in found
    assert REDACTED in json.loads(found)["traceName"]


def test_the_value_after_a_secret_option_is_redacted() -> None:
    assert redact_command(["train.py", "--api-key", "abc", "--lr", "0.1"]) == (
        "train.py", "--api-key", REDACTED, "--lr", "0.1",
    )  # fmt: skip


def test_an_option_after_a_secret_flag_without_value_is_recorded() -> None:
    assert redact_command(["--use-auth", "--lr", "0.1"]) == ("--use-auth", "--lr", "0.1")


@pytest.mark.parametrize(
    "argument",
    [
        "--max-tokens=512", "--tokenizer=gpt2", "--num-key-value-heads=8", "--lr=1e-3", "model.tokens=12", "--monkey=1",
        "https://host/path@v2", "train.py", '{"key": 64}', "a=1,key_dim=64", "https://host/hooks.py?x=1",
    ],
)  # fmt: skip
def test_ordinary_arguments_are_recorded(argument: str) -> None:
    assert redact_command([argument]) == (argument,)


def test_the_environment_keeps_what_changes_performance_and_no_secret() -> None:
    environment = {
        "NCCL_DEBUG": "INFO",
        "OMP_NUM_THREADS": "4",
        "TORCH_NCCL_AVOID_RECORD_STREAMS": "1",
        "NCCL_AUTH_TOKEN": "hunter2",
        "DS_CONFIG": '{"wandb": {"api_key": "hunter2"}}',
        "ACCELERATE_SECRET": "hunter2",
        "UCX_PASSWORD": "hunter2",
        "TORCH_PROXY": "http://user:hunter2@proxy",
        "HOME": "/home/somebody",
        "AWS_SECRET_ACCESS_KEY": "hunter2",
        "TORCHINDUCTOR_CACHE_DIR": "/home/somebody/cache",
    }
    recorded = performance_environment(environment)
    assert recorded == {
        "DS_CONFIG": f'{{"wandb": {{"api_key": "{REDACTED}"}}}}',
        "NCCL_DEBUG": "INFO",
        "OMP_NUM_THREADS": "4",
        "TORCH_NCCL_AVOID_RECORD_STREAMS": "1",
        "TORCH_PROXY": f"http://{REDACTED}@proxy",
    }


def test_names_of_a_trace_are_shown_without_secrets() -> None:
    names = (
        "aten::mm", "void kernel<Key=int, token=3>(float*)", "load s3://me:hunter2@bucket/x?sig=hunter2",
        "push hf_AbCdEfGhIjKlMnOpQrSt",
    )  # fmt: skip
    assert redact_names(names) == (
        *names[:2], f"load s3://{REDACTED}@bucket/x?sig={REDACTED}", f"push {REDACTED}",
    )  # fmt: skip
    assert redact_names(names[:2]) == names[:2]


@pytest.mark.parametrize("indent", [None, 1, 2])
@pytest.mark.parametrize("size", [7, 64, 1 << 20])
def test_what_users_named_in_a_trace_has_no_secrets_and_all_else_stays(size: int, indent: int | None) -> None:
    secret = "hunter2hunter2hunter2"

    def trace(name: str, group: str) -> dict[str, Any]:
        kernel = {"cat": "kernel", "name": "void f<key=3>(float*)", "args": {"Process Group Description": group}}
        mine = {"cat": "user_annotation", "name": name, "ts": 1.5, "args": {"external": 'ünï \\ " {'}}
        return {"distributedInfo": [{"pg_desc": group}], "traceEvents": [kernel, mine, kernel, mine]}

    before = trace(f'a "quoted"\nhf_{secret} of s3://me:{secret}@b/x', f"s3://me:{secret}@b")
    after = trace(f'a "quoted"\n{REDACTED} of s3://{REDACTED}@b/x', f"s3://{REDACTED}@b")
    written = json.dumps(before, indent=indent, ensure_ascii=False)
    if indent is None:
        written = written.replace("}, {", "},\n{")
    pieces = list(redacted_trace(io.BytesIO(written.encode()), size))
    assert json.loads(b"".join(pieces)) == after
