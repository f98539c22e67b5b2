"""The rare cases of a step, which the reducer calls at named moments (:mod:`paceline.ddp.reducer.extension`)."""
