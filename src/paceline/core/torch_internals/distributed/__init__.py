"""Private names of torch's distributed packages."""
