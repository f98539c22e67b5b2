"""The pytest plug-in: its parts in the test process and on the ranks."""
