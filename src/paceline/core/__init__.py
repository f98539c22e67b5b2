"""Modules shared by several packages, which import only each other and the errors."""
