"""Several roles of one recording: each analyzed by itself, then put side by side on a common clock.

Which traces are of which role is decided before: by names and metadata in ``recording.role_jobs``, by what is in the
traces in ``job.apart``.

- ``activity``: when each job is busy, from its ranks' time breakdowns
- ``waits``: the common window, who is idle while whom is busy, whole iterations
- ``devices``: devices that several roles use
- ``words``: the headline and what to do first
- ``side_by_side``: all of it as ``results.roles.Roles``
"""
