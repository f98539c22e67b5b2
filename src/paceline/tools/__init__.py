"""Programs that users start: the command line, recipes, profiles, notebooks and others."""
