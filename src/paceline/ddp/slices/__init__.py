"""Virtual ranks: a step whose slices are added up in one order, whatever the number of ranks."""
