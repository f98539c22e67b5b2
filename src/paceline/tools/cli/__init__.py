"""The entry point of the command line, ``paceline run`` and ``paceline env``."""
