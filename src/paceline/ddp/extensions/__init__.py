"""Extensions of the reducer for the rare cases of a step (see :mod:`paceline.ddp.reducer.extension`)."""
