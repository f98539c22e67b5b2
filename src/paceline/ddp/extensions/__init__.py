"""Extensions for the rare cases of a step, called by the reducer (:mod:`paceline.ddp.reducer.extension`)."""
