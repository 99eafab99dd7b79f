"""Batch scheduler (who runs this step), in-process request scheduler (who gets a request)."""

from .batch import BatchScheduler
from .sequence import RequestState, Sequence
from .settings import SchedulerSettings
from .step import Row, ScheduledStep

__all__ = [
    "BatchScheduler",
    "RequestState",
    "Row",
    "ScheduledStep",
    "SchedulerSettings",
    "Sequence",
]
