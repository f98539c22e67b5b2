"""The ``mrpc`` recipe's data and model."""
