"""The rank's side: the process that runs cells."""
