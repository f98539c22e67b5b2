"""The ``lm`` recipe's model, text and optimizer."""
