"""Recording on a rank: spans, device times, stack samples, host load, torch's profiler."""
