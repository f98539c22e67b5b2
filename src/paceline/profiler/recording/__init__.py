"""Recording on the rank: spans, device times, stacks, the host's load, torch's profiler."""
