"""Virtual ranks: a step sums its slices in an order that does not depend on the number of ranks."""
