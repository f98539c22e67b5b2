"""The public wrapper class and its parts."""
