"""Recording on the rank: spans, device times, torch's profiler."""
