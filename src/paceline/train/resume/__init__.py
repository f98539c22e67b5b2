"""Facts that must be equal when a run is resumed, and its checkpoint folder."""
