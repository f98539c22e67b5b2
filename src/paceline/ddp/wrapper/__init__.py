"""The class that users see, and its parts."""
