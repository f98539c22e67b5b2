"""Compares the ranks' status in every synchronized backward, besides gradients, and acts on it.

Rooms, each above those that it imports:

    step_guard
    ledger
    control_block · mean_loss_warning
    weighting · digest · late_reading · join_events · layer_collectives
"""
