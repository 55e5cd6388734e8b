"""The recording on disk: all that collectors and analyzers both know. Standard library only, but for ``remote``.

``paths`` names the files, ``vocabulary`` the ranges in traces; ``metadata``, ``history`` and ``samples`` define the
content of the others. ``job`` opens a folder for analysis (``captures`` finds which traces belong together, ``remote``
fetches folders from object stores), ``gather`` makes one recording of several nodes' folders.
"""
