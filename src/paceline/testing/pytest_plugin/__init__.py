"""The pytest plug-in: hooks in the test process and on the rank."""
