"""A Trainer for those who prefer not to write the loop, and its parts."""

from paceline.train.config import TrainConfig
from paceline.train.evaluation import Evaluation, evaluate
from paceline.train.result import Result
from paceline.train.trainer import Trainer

__all__ = ["Evaluation", "Result", "TrainConfig", "Trainer", "evaluate"]
