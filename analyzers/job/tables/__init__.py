"""Work tables: every rank's work by name in, one table for the job out.

- ``kernels``: kernels, and which are worth a look; ``operators``: operators;
- ``tables``: modules and launches;
- ``ncu``: the command that profiles the kernels worth a look, and Nsight Compute's export read back;
- ``syncs``: blocking calls after which a device was idle; ``groups``: process groups and their roles.
"""
