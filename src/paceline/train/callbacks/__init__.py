"""Callbacks of a training: the protocol, their view of the run, and those that come with the package."""

from paceline.train.callbacks.early_stopping import EarlyStopping
from paceline.train.callbacks.learning_rate_monitor import LearningRateMonitor
from paceline.train.callbacks.moving_average import ExponentialMovingAverage
from paceline.train.callbacks.protocol import Callback
from paceline.train.callbacks.throughput import ThroughputMonitor

__all__ = [
    "Callback",
    "EarlyStopping",
    "ExponentialMovingAverage",
    "LearningRateMonitor",
    "ThroughputMonitor",
]
