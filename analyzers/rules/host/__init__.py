"""Rules on the host: why does the device wait for it?

``debug_settings`` comes first: where launches are set to block, ``host_syncs`` and ``launch_bound`` have no evidence.
``garbage_collection`` looks at Python, ``recompilation`` at its compiler, ``cpu_oversubscription`` and
``cpu_contention`` at the cores.
"""
