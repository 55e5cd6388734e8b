"""Merged traces: the analysis of a job and its ranks' traces in, one file for Perfetto, or curves for TensorBoard, out.

``merge`` analyzes the job and writes the file. ``choice`` chooses ranks, steps and time windows; ``communication``
names the collectives and messages and finds the arrows between them; ``build_views`` makes a ``rank_view`` of each
rank, from which ``rank_tracks`` writes the rank's tracks where its trace is; ``job_tracks`` writes those of the job.
``pftrace`` is Perfetto's format. ``scalars`` makes the curves of ``perfscope tensorboard`` from the same analysis.
"""
