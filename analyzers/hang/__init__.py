"""The job that stands still: flight-recorder dumps and stacks in, a ``Hang`` out, or None where it did not hang.

In the order of the work: ``job_hang`` reads the files of all ranks, ``progress`` finds how far each rank came in each
group, ``blocked`` the operations at which ranks wait, ``waits`` the roots of the wait-for graph, ``habits`` the ranks
that skipped an operation, ``slowness`` whether the job is only slow, ``first_missed`` the operation to name,
``call_sites`` where in the code ranks stand, ``answer`` puts it together, and ``words`` makes the verdict. Where there
is no trace, ``dumps_only`` makes the Summary.
"""
