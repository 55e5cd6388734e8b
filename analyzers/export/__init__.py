"""Exports: the recorded steps as the input of simulators of other projects.

``export_chakra`` analyzes the job and writes Chakra's execution traces, one file for each rank, as ASTRA-sim reads
them. ``plan`` says what each rank's file has to hold (its own time, its part in the collectives, what they follow) from
the analysis of the whole job; ``communicators`` numbers the process groups and the messages. ``graph`` makes the nodes
of one rank where its trace is; ``kernels`` has what computes in them. ``et_def`` is Chakra's format.
"""
