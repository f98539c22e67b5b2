"""Communication: the bytes that move between ranks."""
