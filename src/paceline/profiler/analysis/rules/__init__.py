"""Rules: functions of the facts of a run. Each advises one change, or returns None where it does not apply.

Rooms, each above those that it imports:

    balance · communication · loop
    host_load · late_ranks
    computing · data · slices_by_speed
    gains
"""
