"""Facts that must be equal when a run goes on, and its checkpoint folder."""
