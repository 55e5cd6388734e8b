"""A job while it runs: the files of its recording in as they grow, the ``LiveState`` of the job out.

- ``source``: lists the folder, on disk or at a URL, and reads what is new in its files;
- ``listing``: which of the files are what;
- ``steps``: the recent steps of all ranks, and sums over the run, from their step histories;
- ``hosts``: load of hosts, devices and processes, from the system sampler's files;
- ``facts``: what the ranks' metadata say, read a few at a time;
- ``stragglers``: the ranks that the others wait for;
- ``states``: whether the job runs, and what happened to it;
- ``job``: all of them at once, again and again, the ``LiveJob``;
- ``state``: what is known at one moment, all that reports show.

Nothing is written, and nothing is sent to the job.
"""
