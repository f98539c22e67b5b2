"""Rules: functions of the facts of a run. Each finds one cause and the change that removes it, or returns None.

Rooms, each above those that it imports:

    data · steps
    communication · cores · ranks
    finding
"""
