"""Keras callbacks for training on several ranks.

Examples:
    >>> tfscale.init()
    >>> data = tfscale.data.GlobalBatches(np.zeros((8, 3)), np.ones((8, 1)), batch_size=4)
    >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    >>> model.compile(tfscale.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    >>> callbacks = [tfscale.callbacks.Synchronize(), keras.callbacks.EarlyStopping("loss")]
    >>> history = model.fit(data, epochs=2, callbacks=callbacks, verbose=0)
    >>> [round(loss, 2) for loss in history.history["loss"]]  # of all ranks' samples
    [0.82, 0.34]
"""

from tfscale.callbacks.adaptive_batch_size import AdaptiveBatchSize
from tfscale.callbacks.base import Callback, RankZero
from tfscale.callbacks.batch_size_schedule import BatchSizeSchedule
from tfscale.callbacks.checkpoint import BackupAndRestore, Checkpoint
from tfscale.callbacks.communication_report import CommunicationReport
from tfscale.callbacks.learning_rate import (
    LearningRateScaling,
    LearningRateScheduleCallback,
    LearningRateWarmupCallback,
)
from tfscale.callbacks.local_models import ModelDistance
from tfscale.callbacks.metric_average import MetricAverageCallback
from tfscale.callbacks.model_checkpoint import BestModelCheckpoint, ModelCheckpoint
from tfscale.callbacks.parameter_averaging import ParameterAveraging
from tfscale.callbacks.synchronize import BroadcastGlobalVariablesCallback, Synchronize
from tfscale.callbacks.theta_monitor import ThetaMonitor

__all__ = [
    "AdaptiveBatchSize",
    "BackupAndRestore",
    "BatchSizeSchedule",
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "Callback",
    "Checkpoint",
    "CommunicationReport",
    "LearningRateScaling",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
    "ModelCheckpoint",
    "ModelDistance",
    "ParameterAveraging",
    "RankZero",
    "Synchronize",
    "ThetaMonitor",
]
