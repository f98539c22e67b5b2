"""The step boundary: the states that every rank keeps in memory at each optimizer step."""
