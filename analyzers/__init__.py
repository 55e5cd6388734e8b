"""Analyzers: one question per module, from a Trace to a Summary.

The flow has one direction: ``readers`` make a Trace; ``rank`` asks every per-rank question of it and returns a small
partial; ``matching``, ``collectives``, ``stragglers`` … look across ranks; ``rules`` turn results into findings;
``analyze`` ties them together.
"""
