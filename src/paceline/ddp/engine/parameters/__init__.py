"""Parameters that are new, shared, or have a mean loss or an optimizer of their own."""
