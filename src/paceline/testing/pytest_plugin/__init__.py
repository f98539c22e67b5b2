"""The pytest plug-in: hooks in the test process and on the rank.

Rooms, each above those that it imports:

    controller
    worker
    hypothesis
    captured_output · coverage · deferred_fixtures · marks · preloaded_modules · users_frames
"""
