"""The job's live objects in, :class:`perfscope.recording.metadata.RunMetadata` out.

``describe`` puts it together from ``strategies`` (with ``sharding`` and ``groups``), ``execution`` and ``model``;
``flops`` counts one step's floating-point operations.
"""
