"""What each rank is doing: flight record, spans, step progress, failpoints."""
