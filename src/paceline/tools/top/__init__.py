"""A live view of a running job, read from its ranks' black boxes: ``paceline top``.

:mod:`paceline.core.telemetry.black_box` defines the values, ``black_box_writer.py`` next to it writes them, and
``table.py`` shows them.
"""
