"""How commands and pages write: words, files, tables, HTML."""
