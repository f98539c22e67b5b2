"""Functions on plain values that split global batches among ranks: by count, cost or speed."""
