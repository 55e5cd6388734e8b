"""The recorded schedules in a form that settings can edit: ops are stretched, taken out, moved and put in.

``replay.engine.Schedules`` are arrays, quick to replay. Here the same are objects; arrays are made of the outcome.

1. ``ops``: one op of one rank, and its part in a collective; ``hosts``: what its host does beside it
2. ``editable``: the ops of all ranks (``EditableSchedules``); ``recorded``: made from a recording
3. ``steps``: one step of one rank written anew
"""
