"""Questions to a GPU: exposed time, graph capture."""
