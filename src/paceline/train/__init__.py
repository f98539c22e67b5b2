"""The Trainer and its parts, with evaluation and prediction that also work in your own loop."""

from paceline.train.callbacks import Callback, EarlyStopping, ExponentialMovingAverage
from paceline.train.config import TrainConfig
from paceline.train.evaluation import Evaluation, evaluate, predict
from paceline.train.loggers import JsonLines, Logger, TensorBoard, WeightsAndBiases
from paceline.train.run import Result, Run
from paceline.train.schedule import lr_factor, scaled_lr
from paceline.train.trainer import Trainer

__all__ = [
    "Callback",
    "EarlyStopping",
    "Evaluation",
    "ExponentialMovingAverage",
    "JsonLines",
    "Logger",
    "Result",
    "Run",
    "TensorBoard",
    "TrainConfig",
    "Trainer",
    "WeightsAndBiases",
    "evaluate",
    "lr_factor",
    "predict",
    "scaled_lr",
]
