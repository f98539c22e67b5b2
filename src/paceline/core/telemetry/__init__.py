"""Records of each rank's work: flight record, spans, step progress, failpoints."""
