"""Compares the ranks' status in every synchronized backward, besides gradients, and acts on it.

Rooms, each above those that it imports:

    step_guard
    ledger
    control_block · digest · kept_gradients · mean_loss_warning · weight_block
    equal_inputs · join_events · late_reading · layer_collectives · weighting
"""
