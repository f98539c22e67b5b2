"""The notebook's side: starts ranks, sends them cells, shows what they answer."""
