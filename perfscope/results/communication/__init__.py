"""What is known of communication beyond traces: ``inspector``, what the profiler plugin of NCCL and RCCL logged."""
