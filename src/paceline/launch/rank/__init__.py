"""The part of the launcher that runs inside a rank."""
