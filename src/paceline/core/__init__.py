"""Modules shared by several packages. They import only each other and the errors."""
