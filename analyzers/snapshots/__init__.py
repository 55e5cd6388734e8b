"""Memory snapshots: torch's files in, ``MemorySnapshots`` out: who holds the memory, what grows, why it ran out.

In the order of the work: ``job_snapshots`` reads the files of all ranks and puts the answers together, ``lifetimes``
follows each allocation from its begin to its end, ``sites`` names the call, module and phase of a stack, ``holders``
who holds memory at the peak, ``growth`` finds steps and what grows from one to the next, ``space`` what the allocator
holds without using it, ``out_of_memory`` why an allocation failed. Where there is no trace, ``snapshots_only`` makes
the Summary.
"""
