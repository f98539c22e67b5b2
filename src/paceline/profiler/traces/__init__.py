"""Traces for Perfetto and Holistic Trace Analysis."""
