"""The wrapper's arguments and its module, checked."""
