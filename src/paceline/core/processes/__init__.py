"""The ranks of a job: who they are, and how they find each other."""

import atexit

from paceline.core.processes.gloo_threads import await_idle

OWN_BACKEND = "paceline"
"""Name of the backend that ``import paceline`` registers, except in the process of the command line."""

atexit.register(await_idle)
