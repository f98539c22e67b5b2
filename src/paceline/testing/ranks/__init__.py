"""The forked ranks of a test, and their outcomes."""
