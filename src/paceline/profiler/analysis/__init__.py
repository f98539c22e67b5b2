"""From records to figures, verdict and advice.

Rooms, each above those that it imports:

    analyze
    advice
    rules
    bucket_sizes
    facts
    bucket_timeline · confidence · noise_scale
    operator_table · step_breakdown
"""
