"""The words of a report: the parts of a step, advice, and figures as text."""
