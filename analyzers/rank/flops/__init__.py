"""FLOPs of one rank's operators: names and recorded shapes in, ``FlopCalls`` out.

``products`` (matrix products), ``layers`` (convolutions, recurrent layers) and ``attention`` have the formulas.
``calls`` applies them to every operator call and counts each product once; ``recomputation`` finds the calls that
recompute (activation checkpointing).
"""
