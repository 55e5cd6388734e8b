"""The colours of pages and figures, each with its name, in light and in dark: style sheets take them as variables.

Colours of the categories: chosen so that any two stay at least 20 apart (CIE76) for normal, protan, deutan and tritan
eyes, on either background; tests/reports/figures/test_colours.py holds them to it.
"""

from __future__ import annotations

from typing import Final

LIGHT: Final = {
    "compute": "#1a5aaa",
    "exposed_comm_wait": "#b3101a",
    "exposed_comm_transfer": "#ee8d3e",
    "exposed_copy": "#2f1e60",
    "idle_dataloader": "#ffde12",
    "idle_sync": "#3b977f",
    "idle_launch": "#94cfff",
    "idle_host": "#70834b",
    "idle_dependency": "#b479b6",
    "idle_unknown": "#bfc3c8",
    "page": "#ffffff",
    "raised": "#f5f6f7",
    "text": "#1b1e22",
    "muted": "#59616b",
    "line": "#dcdfe3",
}
DARK: Final = {
    "compute": "#307edd",
    "exposed_comm_wait": "#b52d0c",
    "exposed_comm_transfer": "#f3a461",
    "exposed_copy": "#64338a",
    "idle_dataloader": "#ffec3d",
    "idle_sync": "#3ac7a2",
    "idle_launch": "#cdefff",
    "idle_host": "#857c4e",
    "idle_dependency": "#cd91d4",
    "idle_unknown": "#51686b",
    "page": "#14171b",
    "raised": "#1e2328",
    "text": "#e7e9ec",
    "muted": "#a0a8b2",
    "line": "#343b43",
}

SERIES: Final = ("#4269d0", "#d89b0d", "#e8604c", "#4fae9b", "#3ca951", "#e774a0", "#a463f2", "#8b7a63")
"""Colours of what is no category: ranks, groups, devices. They can be seen on both backgrounds."""


def dark_of_light() -> dict[str, str]:
    """Each colour that a figure is made with -> the one that it has in the dark."""
    return {colour: DARK[name] for name, colour in LIGHT.items()}


def variables() -> str:
    """The colours as variables of a style sheet: ``--page``, and ``--c-compute`` for a category's."""
    plain = ("page", "raised", "text", "muted", "line")
    return "".join(
        f"--{name if name in plain else f'c-{name}'}:light-dark({light},{DARK[name]});" for name, light in LIGHT.items()
    )
