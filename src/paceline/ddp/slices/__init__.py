"""Virtual ranks: a step whose slices are added up in one order for any number of ranks."""
