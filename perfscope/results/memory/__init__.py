"""What is known of a device's memory beyond its peak: ``snapshots`` of the caching allocator."""
