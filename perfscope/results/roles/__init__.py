"""Several roles of one recording: ``side_by_side`` has what holds of all of them together."""
