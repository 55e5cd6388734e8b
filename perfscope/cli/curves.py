"""What the verbs ask that write a job's curves elsewhere: ``tensorboard``, ``wandb``, ``mlflow``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from perfscope.cli.number import Whole


def curve_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Which ranks and captures to write, and with how many processes."""
    for option in (
        click.option("--workers", type=Whole(min=1), help="Processes that read ranks in parallel."),
        click.option("--capture", type=Whole(min=0), help="Which capture to write, counted from 0.  [default: all]"),
        click.option(
            "--ranks",
            metavar="LIST|all",
            help="Ranks to write besides the job, such as 0,3-7.  "
            "[default: all of up to 8, else the 8 most informative ones]",
        ),
    ):
        command = option(command)
    return command
