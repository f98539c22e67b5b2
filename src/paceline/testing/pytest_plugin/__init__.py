"""The pytest plug-in: the parts that run in the test process, and those that run on the ranks."""
