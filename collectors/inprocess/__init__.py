"""Recording from inside the program: ``perfscope.record``, ``perfscope.start`` and ``stop``, the variable PERFSCOPE.

``options`` are those of ``perfscope run``; ``program`` starts and ends recordings, of which a process has one at a
time; ``late`` hooks what the program has made before; ``place`` has all ranks of a job choose the same folder, at the
first step, because only then is it certain which rank a process is. ``variable`` starts a recording where PERFSCOPE
asks for it: ``perfscope.pth``, which is installed beside the package, calls it at every start of Python.
"""
