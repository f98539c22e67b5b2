"""Programs that a person starts: the command line, recipes, profile, notebook and others."""
