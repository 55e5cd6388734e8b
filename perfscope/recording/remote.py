"""Folders on object stores (``s3://``, ``gs://``, ``abfs://``, ``hf://`` and whatever else fsspec knows).

A remote folder is a ``universal_pathlib.UPath``, which lists and opens like a ``pathlib.Path``: what finds the files of
a job works on both. A trace is fetched to a temporary file by the worker that reads it, and removed at once: at most
one a worker is on disk.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, cast

from perfscope.errors import PerfscopeError, TraceError, UnusableInput

_URL: Final = re.compile(r"[a-z][a-z0-9+.-]+://", re.IGNORECASE)
_DRIVERS: Final = {
    "s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "abfss": "adlfs", "az": "adlfs",
    "hf": "huggingface_hub",
}  # fmt: skip
"""Protocol -> the package that fsspec needs for it."""
_CREDENTIALS: Final = {
    "s3fs": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or a role; AWS_ENDPOINT_URL for another server",
    "gcsfs": "gcloud auth application-default login, or GOOGLE_APPLICATION_CREDENTIALS",
    "adlfs": "AZURE_STORAGE_ACCOUNT_NAME with AZURE_STORAGE_ACCOUNT_KEY, or AZURE_STORAGE_CONNECTION_STRING",
    "huggingface_hub": "HF_TOKEN",
}
_VERSIONS: Final = ("ETag", "etag", "generation", "md5Hash", "blob_id", "content_md5")
"""What the stores call the mark that changes with a file's content."""


def is_url(text: str) -> bool:
    """Whether a user's word for a folder is a URL rather than a path."""
    return _URL.match(text) is not None


def is_remote(path: Path) -> bool:
    """Whether a path is one that ``opened`` made."""
    return getattr(path, "protocol", "") not in ("", "file", "local")


@contextmanager
def opened(path_or_url: str | Path, *, must_exist: bool = True) -> Iterator[Path]:
    """A folder or file as a path, whether on disk or at a URL; errors of a remote store are reported with a remedy.

    Raises UnusableInput where a URL does not exist (allowed without ``must_exist``) or may not be read, PerfscopeError
    where a package is missing.
    """
    url = str(path_or_url)
    if not is_url(url):
        yield Path(path_or_url)
        return
    protocol = url.partition("://")[0].lower()
    driver = _DRIVERS.get(protocol)
    try:
        from upath import UPath
    except ImportError as error:
        raise PerfscopeError(f"{url}: remote folders need pip install 'perfscope-profiler[remote]'") from error
    try:
        path = UPath(url)
        found = path.exists()
    except (ImportError, ValueError) as error:
        install = f"pip install {driver}" if driver else "install the package that fsspec needs for it"
        raise PerfscopeError(f"{url}: {protocol}:// cannot be read here ({error}); {install}") from error
    except Exception as error:  # each store has its own
        raise _told(url, driver, error) from error
    if must_exist and not found:
        raise UnusableInput(f"{url}: no such bucket, folder or file{_hint(driver)}")
    try:
        yield cast("Path", path)
    except (PerfscopeError, MemoryError):
        raise
    except Exception as error:
        raise _told(url, driver, error) from error


def read_head(path: Path, count: int) -> bytes:
    """The first bytes of a file, remote or not; of a remote one no more than these are fetched. Raises OSError."""
    if is_remote(path):
        store = cast("Any", path)
        data: bytes = store.fs.cat_file(store.path, start=0, end=count)
        return data
    with path.open("rb") as stream:
        return stream.read(count)


@contextmanager
def fetched(path: Path) -> Iterator[Path]:
    """A copy of a remote file in a temporary folder, under its own name. Raises TraceError where it cannot be had."""
    import shutil
    import tempfile

    with tempfile.TemporaryDirectory(prefix="perfscope-", ignore_cleanup_errors=True) as folder:
        local = Path(folder) / path.name
        try:
            with path.open("rb") as source, local.open("wb") as target:
                shutil.copyfileobj(source, target, 8 << 20)
        except Exception as error:
            raise TraceError(
                f"{path}: cannot be fetched ({type(error).__name__}: {error}); check the network, the credentials, and "
                f"that {folder} has room (TMPDIR names another place)"
            ) from error
        yield local


def version(path: Path) -> str | None:
    """What names a remote file's content, its place included; None where the store does not report it."""
    remote = cast("Any", path)
    try:
        info = remote.fs.info(remote.path)
    except Exception:  # reading it will raise the error
        return None
    marks = [f"{name}={info[name]}" for name in _VERSIONS if info.get(name)]
    return f"{path}\0{info.get('size')}\0{marks[0]}" if marks else None


def _told(url: str, driver: str | None, error: Exception) -> UnusableInput:
    return UnusableInput(f"{url}: cannot be read ({type(error).__name__}: {error}){_hint(driver)}")


def _hint(driver: str | None) -> str:
    return f"; credentials come from {_CREDENTIALS[driver]}" if driver in _CREDENTIALS else ""
