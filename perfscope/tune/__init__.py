"""``perfscope tune``: run a command with settings changed from outside, and report which of them help.

In comes a command; out come ``tune.json`` and a table. The work passes through:

1. ``tune``: records the command, proposes, searches, writes the result
2. ``baseline``: what that recording holds: settings, findings, predictions of changes
3. ``candidates``: a change to try; ``proposals``: those that suit the job, and those of ``--try``
4. ``search``: decides what to try next and what helps; ``measuring``: step time, its error, whether a gain is real
5. ``trials``: runs the command with the settings of one trial
6. ``permanent``: the lines that make a change permanent; ``result``: JSON and text
"""
