"""Saves: which steps are due (:mod:`.due_saves`), and how they are written, at once or in the background."""
