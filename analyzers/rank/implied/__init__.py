"""What a trace implies and does not hold, put into it before anything else looks at it.

``waits``: waits of a host for its device that no call shows. ``host_lanes``: collectives of tensors on the device that
a backend carries out on the host. ``inserted_calls``: how calls are put in.
"""
