"""Keeps secrets out of a recording: command lines and environment variables are stored without them."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import IO, Any, Final

REDACTED: Final = "[redacted]"

ENVIRONMENT_PREFIXES: Final = (
    "ACCELERATE_", "CUBLAS_", "CUDA_", "CUDNN_", "DS_", "FI_", "FSDP_", "GLOO_", "HIP_", "HOROVOD_", "HSA_", "KMP_",
    "MKL_", "NCCL_", "NVIDIA_TF32_OVERRIDE", "OMP_", "OPENBLAS_", "PYTORCH_", "RCCL_", "ROCR_", "TORCH_",
    "TORCHDYNAMO_", "TORCHINDUCTOR_", "TP_", "UCX_", "XLA_", "SLURM_CPUS_", "SLURM_CPU_BIND", "SLURM_GPUS",
    "SLURM_JOB_NUM_NODES", "SLURM_MEM_BIND", "SLURM_NNODES", "SLURM_NTASKS", "SLURM_TASKS_PER_NODE",
    "SLURM_THREADS_PER_CORE",
)  # fmt: skip
"""Variables that change how a run performs; only names that begin so are stored.

Cache folders are not: they are named after users."""

_SECRET_NAME = re.compile(r"secret|token|key|passw|credential|auth", re.IGNORECASE)
"""In an environment variable's name: its value is left out. Wide on purpose: losing a harmless one costs little."""

_SECRET_WORDS: Final = frozenset(
    ("secret", "token", "key", "apikey", "password", "passwd", "passphrase", "pwd", "credential", "credentials", "auth",
     "authorization", "bearer", "signature", "sig")
)  # fmt: skip
"""In a name as a whole word: ``--hf-token``, ``X-Amz-Signature``, ``AccountKey``, not ``--max-tokens``."""

_SECRET_SHAPES: Final = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|[sr]k_(?:live|test)_\w{16,}|gh[opsur]_[A-Za-z0-9]{16,}"
    r"|github_pat_\w{16,}|glpat-[\w-]{16,}|A[KS]IA[A-Z0-9]{12,}|AIza[\w-]{30,}|ya29\.[\w-]{16,}"
    r"|xox[a-z]-[\w-]{10,}|xapp-[\w-]{10,}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]*|nvapi-[\w-]{16,}|dapi[0-9a-f]{32}"
    r"|pypi-[\w-]{16,}|npm_[A-Za-z0-9]{16,}|r8_[A-Za-z0-9]{16,}|gsk_[A-Za-z0-9]{16,}|SG\.[\w-]{16,}\.[\w-]{16,})"
    r"|(?<=\bBearer )[\w.~+/=-]{8,}|(?<=\bBasic )[A-Za-z0-9+/]{8,}={0,2}"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*-----|\Z)",
    re.DOTALL,
)
"""Values that are secrets whatever they are called."""

_MARKS: Final = (
    "://", "hf_", "sk-", "k_live_", "k_test_", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_", "glpat-", "AKIA",
    "ASIA", "AIza", "ya29.", "xox", "xapp-", "eyJ", "nvapi-", "dapi", "pypi-", "npm_", "r8_", "gsk_", "SG.", "Bearer ",
    "Basic ", "PRIVATE KEY",
)  # fmt: skip
"""One of them is in every secret of a shape, and in every URL: looked for first, since a trace has many names."""

_BYTE_MARKS: Final = tuple(mark.encode() for mark in _MARKS)

_EQUALS: Final = tuple(
    f"{form}=".encode() for word in sorted(_SECRET_WORDS) for form in (word, word.capitalize(), word.upper())
)
"""In texts with ``name=value`` of a secret."""

_NAMES_PAIR: Final = re.compile(
    rf"(?:{'|'.join(sorted(_SECRET_WORDS, key=len, reverse=True))})(?:=|[\\/]?\"?\s?:\s?[\\/]?\")", re.IGNORECASE
)
"""A pair whose name may name a secret."""

_PAIR_SIGN: Final = re.compile(r"=|:\s?[\\/]?\"")
"""In every pair, after its name."""

_BEFORE_SIGN: Final = max(map(len, _SECRET_WORDS)) + len('\\" ')
"""Characters of a pair before that sign, at most: a word, a slash, a quotation mark, a space."""

_NAMED: Final = (b'user_annotation"', b'Process Group Description"', b'pg_desc"', b'traceName"')
"""In a line of a trace that holds a name of the user's, or that is above one; that of the trace is its path. Looked for
one by one, which is quicker than at once."""

_STRING: Final = re.compile(rb'"(?:[^"\\\n]|\\.)*"')
"""A JSON string within a line."""

_URL_PASSWORD: Final = re.compile(r"(?<=://)[^/@\s]+(?=@)")

_WEBHOOK: Final = re.compile(r"(://[^/\s]*hook[^/\s]*/|://[^\s?#]*/[\w-]*hooks?/)[^\s\"'?#]+", re.IGNORECASE)
"""The path of a webhook's URL is its password."""

_PAIR: Final = re.compile(r"(?<![\w.%-])([\w.%-]+)(=|[\\/]?\"?\s?:\s?[\\/]?\")([^&;,\s\"'\\]+)")
"""``name=value`` in a URL's query, in a connection string or in a list of options, and ``"name": "value"``, its
quotation marks escaped or not; kineto makes slashes of the backslashes before them.
"""

_NAME_PAIR: Final = re.compile(r"(?<![\w.%<-])([\w.%-]+)(=|[\\/]?\"?\s?:\s?[\\/]?\")([^&;,:<>()\[\]{}*\s\"'\\]{8,})")
"""The same in a name, where short values and types are none: ``kernel<Key=int>``."""

_LONGEST: Final = 100_000
"""Characters of a value that are looked at; what follows is cut."""


def redact_command(arguments: Iterable[str]) -> tuple[str, ...]:
    """A command line without the values of options that look like secrets, and without values that are secrets."""
    redacted: list[str] = []
    secret_follows = False
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if secret_follows and not argument.startswith("-") and not _harmless(argument):
            redacted.append(REDACTED)
            secret_follows = False
            continue
        names_secret = _names_secret(name)
        secret_follows = names_secret and not equals and argument.startswith("-")
        if names_secret and equals and not _harmless(value):
            redacted.append(f"{name}={REDACTED}")
        else:
            redacted.append(redact_value(argument))
    return tuple(redacted)


def redact_value(value: str) -> str:
    """A value without the secrets in it: what has a secret's shape, passwords and signatures in URLs, webhooks, and
    values of pairs whose name names a secret (``AccountKey=…;``, ``{"api_key": "…"}``).
    """
    value = value[:_LONGEST]
    value = _WEBHOOK.sub(rf"\g<1>{REDACTED}", _URL_PASSWORD.sub(REDACTED, value))
    return _SECRET_SHAPES.sub(REDACTED, _PAIR.sub(_pair, value))


def redact_names(names: Sequence[str]) -> tuple[str, ...]:
    """The names of a trace without secrets: without what has a secret's shape, and without the secrets of URLs and of
    pairs whose name names one.
    """
    joined = "\n".join(names)
    if not any(mark in joined for mark in _MARKS) and not _has_pair(joined):
        return tuple(names)
    return tuple(map(_redact_name, names))


def _redact_name(name: str) -> str:
    redacted = redact_value(name) if "://" in name else _SECRET_SHAPES.sub(REDACTED, name)
    return _NAME_PAIR.sub(_name_pair, redacted) if "<" not in name and _has_pair(name) else redacted


def _has_pair(text: str) -> bool:
    """Whether the text has a pair whose name may name a secret; looks for the signs, which few names have, first."""
    return any(
        _NAMES_PAIR.search(text, max(sign.start() - _BEFORE_SIGN, 0), sign.end()) for sign in _PAIR_SIGN.finditer(text)
    )


def redacted_trace(trace: IO[bytes], size: int) -> Iterator[bytes]:
    """A Chrome trace as the profiler writes it, in pieces of about ``size`` bytes, without the secrets in what the user
    named: ranges and process groups.

    All other names are the framework's own. They are not looked at, which would take longer than compressing them.
    """
    while piece := trace.read(size):
        line = trace.readline()
        piece += line
        while any(mark in line for mark in _NAMED):  # the name may be in the line below
            line = trace.readline()
            piece += line
        yield _redacted_piece(piece)


def redacted_lines(file: IO[bytes], size: int) -> Iterator[bytes]:
    """A JSON file of many lines, in pieces of about ``size`` bytes, without the secrets in any of its strings."""
    while piece := file.read(size):
        piece += file.readline()
        marks = [mark for mark in (*_BYTE_MARKS, *_EQUALS) if mark in piece]
        if not marks:
            yield piece
            continue
        lines = piece.splitlines(keepends=True)
        yield b"".join(_STRING.sub(_string, line) if any(m in line for m in marks) else line for line in lines)


def _redacted_piece(lines: bytes) -> bytes:
    parts, done = [], 0
    for place in sorted(place for mark in _NAMED for place in _places(mark, lines)):
        if place < done:
            continue
        begin = lines.rfind(b"\n", done, place) + 1 or done
        end = lines.find(b"\n", lines.find(b"\n", place) + 1 or len(lines)) + 1 or len(lines)
        named = lines[begin:end]
        redacted = _STRING.sub(_string, named) if any(mark in named for mark in _BYTE_MARKS) else named
        # Kineto writes names as they are: a quotation mark in one ends its string.
        text = redacted.decode("utf-8", "surrogateescape")
        if _has_pair(text):
            redacted = _NAME_PAIR.sub(_name_pair, text).encode("utf-8", "surrogateescape")
        if redacted is not named:
            parts += [lines[done:begin], redacted]
            done = end
    return b"".join((*parts, lines[done:])) if parts else lines


def _places(mark: bytes, text: bytes) -> Iterator[int]:
    place = text.find(mark)
    while place >= 0:
        yield place
        place = text.find(mark, place + len(mark))


def _string(found: re.Match[bytes]) -> bytes:
    literal = found[0]
    if not any(mark in literal for mark in (*_BYTE_MARKS, *_EQUALS)):
        return literal
    try:
        text = json.loads(literal)
    except ValueError:
        text = literal[1:-1].decode("utf-8", "backslashreplace")
    redacted = redact_names((text,))[0]
    return literal if redacted == text else json.dumps(redacted).encode("ascii")


def _name_pair(found: re.Match[str]) -> str:
    return _pair(found, _NAME_PAIR)


def _pair(found: re.Match[str], pairs: re.Pattern[str] = _PAIR) -> str:
    name, between, value = found.groups()
    if not _names_secret(name):
        value = pairs.sub(functools.partial(_pair, pairs=pairs), value)
    elif not _harmless(value):
        value = REDACTED
    return f"{name}{between}{value}"


def redact_settings(value: Any, *, secret: bool = False) -> Any:
    """A JSON value without what lies under keys that name secrets, and without values that are secrets.

    ``secret``: the value lies under such a key.
    """
    if isinstance(value, dict):
        return {name: redact_settings(each, secret=secret or _names_secret(str(name))) for name, each in value.items()}
    if isinstance(value, list):
        return [redact_settings(each, secret=secret) for each in value]
    if secret and not isinstance(value, (bool, type(None))) and not _harmless(str(value)):
        return REDACTED
    return redact_value(value) if isinstance(value, str) else value


def redact_texts(value: Any) -> Any:
    """A JSON value without the secrets in its texts, whatever their keys are called."""
    if isinstance(value, dict):
        return {name: redact_texts(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [redact_texts(each) for each in value]
    return redact_value(value) if isinstance(value, str) else value


def performance_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that change how a run performs, secrets left out, sorted by name."""
    return {
        name: redact_value(environment[name])
        for name in sorted(environment)
        if name.startswith(ENVIRONMENT_PREFIXES) and not _SECRET_NAME.search(name) and not name.endswith("_CACHE_DIR")
    }


def _names_secret(name: str) -> bool:
    words = re.split(r"[^a-z0-9]+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower())
    return not _SECRET_WORDS.isdisjoint(words)


def _harmless(value: str) -> bool:
    """Short numbers and switches are settings (``--num-key-value-heads 8``), not secrets."""
    return value.lower() in ("", "true", "false", "none") or (value.isdecimal() and len(value) < 6)
