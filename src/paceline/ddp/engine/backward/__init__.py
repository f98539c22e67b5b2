"""One synchronized backward, stage by stage."""
