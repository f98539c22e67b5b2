"""A Trainer for those who prefer not to write the loop, and its parts.

Rooms, each above those that it imports:

    trainer
    loop
    callbacks · prediction · training_step
    evaluation
    learning_rate · metrics · resume · validation
    config · result
"""

from paceline.train.callbacks import (
    Callback,
    EarlyStopping,
    ExponentialMovingAverage,
    LearningRateMonitor,
    Run,
    ThroughputMonitor,
)
from paceline.train.config import TrainConfig
from paceline.train.evaluation import Evaluation, evaluate
from paceline.train.learning_rate import lr_factor, scaled_lr
from paceline.train.metrics.loggers import MetricsLogger
from paceline.train.prediction import predict
from paceline.train.result import Result
from paceline.train.trainer import Trainer

__all__ = [
    "Callback",
    "EarlyStopping",
    "Evaluation",
    "ExponentialMovingAverage",
    "LearningRateMonitor",
    "MetricsLogger",
    "Result",
    "Run",
    "ThroughputMonitor",
    "TrainConfig",
    "Trainer",
    "evaluate",
    "lr_factor",
    "predict",
    "scaled_lr",
]
