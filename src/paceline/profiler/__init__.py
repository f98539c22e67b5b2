"""The profiler: what every rank's steps are made of, and who keeps the others waiting."""

from paceline.profiler.stragglers import Straggler as Straggler
from paceline.profiler.stragglers import find_stragglers as find_stragglers
