"""A Trainer for those who prefer not to write the loop, and its parts."""

from paceline.train.evaluation import Evaluation, evaluate
from paceline.train.learning_rate import lr_factor, scaled_lr
from paceline.train.loggers import MetricsLogger
from paceline.train.result import Result
from paceline.train.train_config import TrainConfig
from paceline.train.trainer import Trainer

__all__ = ["Evaluation", "MetricsLogger", "Result", "TrainConfig", "Trainer", "evaluate", "lr_factor", "scaled_lr"]
