"""The recorded steps of all ranks, played again with something changed."""
