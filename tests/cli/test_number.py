"""Numbers on the command line are refused in words."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from perfscope.cli.main import main


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("analyze", "x", "--capture", "last"), "'--capture': must be a whole number of at least 0, not 'last'"),
        (("analyze", "x", "--workers", "0"), "'--workers': must be a whole number of at least 1, not '0'"),
        (("compare", "x", "y", "--noise", "-1"), "'--noise': must be a number from 0 to 100, not '-1'"),
        (("run", "--active", "8.5", "true"), "'--active': must be a whole number, not '8.5'"),
        (("run", "--trigger", "nan", "true"), "'--trigger': must be a number, not 'nan'"),
        (("whatif", "x", "--capture", "-1"), "'--capture': must be a whole number of at least 0, not '-1'"),
    ],
)
def test_it_says_which_numbers_are_meant(arguments: tuple[str, ...], words: str) -> None:
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 2
    assert words in done.output
