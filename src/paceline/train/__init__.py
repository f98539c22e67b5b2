"""The Trainer and its parts, with evaluation and prediction that also work in your own loop."""

from paceline.train.callbacks.early_stopping import EarlyStopping
from paceline.train.callbacks.moving_average import ExponentialMovingAverage
from paceline.train.callbacks.protocol import Callback
from paceline.train.config import TrainConfig
from paceline.train.evaluation import Evaluation, evaluate
from paceline.train.metrics.loggers import JsonLines, Logger, MLflow, TensorBoard, WeightsAndBiases
from paceline.train.prediction import predict
from paceline.train.run.result import Result
from paceline.train.run.run import Run
from paceline.train.schedule import lr_factor, scaled_lr
from paceline.train.trainer import Trainer

__all__ = [
    "Callback",
    "EarlyStopping",
    "Evaluation",
    "ExponentialMovingAverage",
    "JsonLines",
    "Logger",
    "MLflow",
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
