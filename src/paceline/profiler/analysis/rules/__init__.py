"""Rules: functions of the facts of a run. Each advises one change, or returns None where it does not apply."""
