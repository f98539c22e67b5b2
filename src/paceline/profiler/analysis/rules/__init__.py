"""Rules: functions of the facts of a run. Each finds one cause and the change that removes it, or returns None.

``advice.py`` lists the rules.
"""
