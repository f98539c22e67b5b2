"""Recipes: whole training programs that come with Paceline, one file each.

Rooms, each above those that it imports:

    commands · digits · lm · mrpc
    configs
    training_options
    hugging_face · language_model · paraphrases · recipe_report · slice_cost
    memory_fit
"""
