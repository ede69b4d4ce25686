"""Arrays on the host and on a device: libraries, value types, segments, scans, threads, torch tensors."""
