"""What to type, among the sentences of an action: fenced as in Markdown, which JSON can hold and pull requests show."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

LANGUAGES: Final = ("python", "shell", "json", "yaml")
"""Of what is fenced: each can be pasted where the sentence before it says."""
_FENCED: Final = re.compile(rf"^```({'|'.join(LANGUAGES)})\n(.*?)\n```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """Sentences, or code of one of ``LANGUAGES``."""

    language: str
    """Empty for sentences."""
    text: str


def code(language: str, text: str) -> str:
    """Code as a part of ``Action.how``; on lines of its own."""
    return f"```{language}\n{text}\n```"


def blocks(how: str) -> tuple[Block, ...]:
    """The sentences and the code of ``Action.how``, in their order; none of them is empty."""
    # Of a pattern with two groups, split gives: sentences, language, code, sentences, language, code, sentences.
    first, *others = _FENCED.split(how)
    found = [Block("", first.strip())]
    for language, text, after in zip(others[::3], others[1::3], others[2::3], strict=True):
        found += [Block(language, text), Block("", after.strip())]
    return tuple(block for block in found if block.text)


def plain(how: str) -> str:
    """``Action.how`` without the fences, for what shows no Markdown."""
    return "\n".join(block.text for block in blocks(how))
