"""A Trainer for those who prefer not to write the loop, and its parts."""

from paceline.train.config import TrainConfig
from paceline.train.evaluation import Evaluation, evaluate
from paceline.train.learning_rate import lr_factor, scaled_lr
from paceline.train.metrics.loggers import MetricsLogger
from paceline.train.result import Result
from paceline.train.trainer import Trainer

__all__ = ["Evaluation", "MetricsLogger", "Result", "TrainConfig", "Trainer", "evaluate", "lr_factor", "scaled_lr"]
