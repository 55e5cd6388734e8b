"""Collectives across ranks: every rank's own in, matched instances with waits and transfers out.

The work passes through the modules in this order:

- ``groups``: which of the ranks' process groups are the same;
- ``unmatched``: values: the ranks' parts in collectives, with one numbering for the job; mismatches;
- ``sequences``: collectives matched by sequence number, else by order, also where the ranks' orders differ;
- ``point_to_point``: sends and recvs paired by their peers, else by when they end;
- ``matched``: the result (MatchedCollectives, Instances), with arrivals, waits and transfers;
- ``matching``: all of this in order; aligns the clocks by it, and corrects by time what order matched wrongly;
- ``of_loop``: which of them the training loop calls for itself: metrics, barriers;
- ``returned``: gradients that are reduced to one rank, and broadcast back;
- ``table``, ``cost_model``, ``group_roles``: bandwidths, t(S) = alpha + S / B, and what each group is for.
"""
