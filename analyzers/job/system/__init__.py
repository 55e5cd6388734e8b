"""The machines: the system sampler's files in, hosts, devices and processes during the used steps out.

- ``samples``: reads the files, and averages over an interval;
- ``table``: the rows of the Summary, and curves for charts;
- ``notes``: slowed clocks, quotas, swap, saturated disks and workers, in words.
"""
