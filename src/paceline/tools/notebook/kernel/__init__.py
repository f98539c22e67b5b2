"""The notebook's side: starts ranks, sends them cells, and shows their answers."""
