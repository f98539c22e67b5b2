"""Output of commands and pages: wording, files, tables, charts, HTML."""
