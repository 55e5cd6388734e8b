"""Where work runs: nothing here knows traces.

- ``machine``: cores and memory that this process may use;
- ``memory_bound``: an end to reading what memory would not hold;
- ``engine``: a function mapped over items, here, on worker processes or on a dask cluster;
- ``cache``: results stored under the hash of the file that they were made from;
- ``pickle_sizes``: a look at a pickle of the cache before it is read.
"""
