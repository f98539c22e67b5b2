"""Recipes: whole training programs that come with Paceline, one file each.

Rooms, each above those that it imports:

    commands · digits · lm · mrpc
    configs
    training_options
    hugging_face · language_model · memory_fit · paraphrases · recipe_report
"""
