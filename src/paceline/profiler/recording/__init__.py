"""Records spans, device times, stack samples, host load and the output of torch's profiler on a rank."""
