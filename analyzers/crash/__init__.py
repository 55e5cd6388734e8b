"""The job that failed: the ranks' metadata in, a ``Crash`` out, or None where none is known to have failed of its own.

``job_crash`` finds which rank ended first and which failed in consequence, ``lost_peer`` tells an exception of the
communication from others, and ``words`` makes the verdict. A job of which ranks wait until a timeout ends them stands
still instead (``perfscope.analyzers.hang``).
"""
