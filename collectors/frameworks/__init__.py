"""Training frameworks, one module each: ``install`` gives their functions ranges, ``describe`` returns their settings.

``PHASES`` lists the functions that need no more than a range. ``frameworks`` calls all modules; ``hooks`` is what
ranges are made with, ``values`` turns settings into JSON. ``torch`` is torch itself: collectives, pipelines,
``torch.save``. ``nvtx`` mirrors the script's own NVTX ranges. A framework that the script has not imported is left
alone.
"""
