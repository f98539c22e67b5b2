"""Programs that a person starts: the command line, recipes, profile, notebook and others.

Rooms, each above those that it imports:

    __main__ · cli
    recipes
    profile
    bench · checkpoints · compare · explain · memory_estimate · notebook · top
"""
