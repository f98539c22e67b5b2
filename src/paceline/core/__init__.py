"""Modules that several packages share. They import nothing above them but the errors."""
