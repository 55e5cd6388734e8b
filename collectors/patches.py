"""Replaces attributes for a while and puts the very same objects back."""

from __future__ import annotations

from typing import Any, Final

_INHERITED: Final = object()


class Patches:
    """Attributes replaced on modules and classes, undone together."""

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, Any, Any]] = []

    def any(self) -> bool:
        """Is anything replaced?"""
        return bool(self._undo)

    def set(self, owner: Any, name: str, replacement: Any) -> None:
        """Replace ``owner.name``, which must be in the owner's own namespace so that it can be put back there."""
        original = vars(owner)[name]
        setattr(owner, name, replacement)
        self._undo.append((owner, name, original, vars(owner)[name]))

    def add(self, owner: type[Any], name: str, attribute: Any) -> None:
        """Give a class an attribute ``name`` that it inherits."""
        setattr(owner, name, attribute)
        self._undo.append((owner, name, _INHERITED, vars(owner)[name]))

    def restore(self) -> None:
        """Put every original back, last first. What somebody else has replaced meanwhile stays theirs."""
        while self._undo:
            owner, name, original, replacement = self._undo.pop()
            if vars(owner).get(name) is not replacement:
                continue
            if original is _INHERITED:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
