"""From records to figures, verdict and advice.

Rooms, each above those that it imports:

    analyze
    advice · headline
    rules
    bucket_size_simulation
    metrics
    bucket_timeline · gradient_noise_scale
    operator_table · step_breakdown · straggler_check
"""
