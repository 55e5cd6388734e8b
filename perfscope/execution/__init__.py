"""Where work runs: nothing here knows traces.

- ``machine``: cores and memory that this process may use;
- ``allocator``: what the C library does with memory that is given back;
- ``memory_bound``: an end to reading what memory would not hold;
- ``engine``: a function mapped over items: here (``serial``), on processes forked beside the caller's (``forked``), or
  on any ``concurrent.futures.Executor``, such as a dask cluster's (``executors``);
- ``outcome``: what comes of one item, wherever it ran;
- ``cache``: results stored under the hash of the file that they were made from;
- ``pickle_sizes``: a look at a pickle of the cache before it is read.
"""
