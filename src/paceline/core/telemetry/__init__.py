"""Records of each rank's work: black box, spans, step progress, failpoints."""
