"""The pytest plug-in, with parts for the test process and parts for the ranks."""
