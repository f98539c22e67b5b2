"""Recording on the rank: spans, device times, stacks, the host's load, torch's profiler.

Rooms, each above those that it imports:

    recorder · trial
    step_writer · torch_spans
    data_samples · device_times · environment · gradient_norms · stack_samples
    host_load · optimizer_trial · torch_profiler
"""
