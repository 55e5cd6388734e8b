"""A running job for those who watch it: ``LiveState`` in; a screen, lines, JSON and metrics out.

- ``view``: what the user chose to see, and the keys that change it;
- ``table``: the table of ranks, those that matter first;
- ``screen``: the whole screen, in any size;
- ``line``: one line of text, or of JSON, for pipes;
- ``terminal``: the terminal that shows a screen and gives keys;
- ``watching``: the loop around all of them;
- ``metrics``: the numbers that are exported; ``prometheus`` and ``otel`` do so by way of their own packages.

The screen is ANSI escapes and the standard library: nothing to install on a login node, and no other verb starts later.
"""
