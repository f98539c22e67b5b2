"""The ``lm`` recipe's model and text."""
