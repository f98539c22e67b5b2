"""Recipes: whole training programs that come with Paceline, one file each.

Rooms, each above those that it imports:

    commands · digits · lm · mrpc
    configs
    hugging_face · report · text
    gpt · options · pairs
"""
