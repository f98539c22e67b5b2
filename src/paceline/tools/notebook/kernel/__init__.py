"""The kernel's side: starts ranks, sends them cells, and shows their output."""
