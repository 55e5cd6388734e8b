"""What ``perfscope tune`` replaced in this process, and what it could not: for the rank's metadata.

Empty under ``perfscope run``, where nothing is ever replaced.
"""

from __future__ import annotations

from typing import Any, Final

_PLAIN: Final = (bool, int, float, str, type(None))


class Log:
    """Setting -> what became of it. The metadata hold it as ``applied``."""

    def __init__(self) -> None:
        self._entries: dict[str, dict[str, Any]] = {}

    def replaced(self, setting: str, old: Any, new: Any) -> None:
        """A setting of the script's was ``old`` and is ``new``; the first of several objects is described."""
        entry = self._entry(setting)
        if not entry["times"]:
            entry.update({"from": _plain(old), "to": _plain(new)})
        entry["times"] += 1

    def refused(self, setting: str, reason: str) -> None:
        """A setting was left as the script has it, or put back."""
        self._entry(setting)["refused"] = " ".join(reason.split())

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """``{"ddp.bucket_cap_mb": {"from": 25, "to": 4, "times": 1, "refused": ""}}``."""
        return {setting: dict(entry) for setting, entry in self._entries.items()}

    def clear(self) -> None:
        """Forget everything."""
        self._entries.clear()

    def _entry(self, setting: str) -> dict[str, Any]:
        return self._entries.setdefault(setting, {"from": None, "to": None, "times": 0, "refused": ""})


def _plain(value: Any) -> Any:
    return value if isinstance(value, _PLAIN) else repr(value)


LOG: Final = Log()
"""This process's."""
