"""Recording on the rank: spans, device times, stacks, the host's load, torch's profiler.

Rooms, each above those that it imports:

    recorder
    step_writer
    batches · device_times · environment · gradient_norms · stack_samples · torch_spans
    host_load · torch_profiler
"""
