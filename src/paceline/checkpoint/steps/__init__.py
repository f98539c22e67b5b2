"""The step boundary: what every rank keeps in memory at each optimizer step."""
