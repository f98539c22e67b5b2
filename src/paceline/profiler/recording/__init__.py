"""Recording on a rank: spans, device times, stacks, the host's load, torch's profiler."""
