"""What several packages share; imports nothing above it but the errors."""
