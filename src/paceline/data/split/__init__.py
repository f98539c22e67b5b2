"""Splits global batches among ranks: by count, by cost, by speed. All of it is functions of plain values."""
