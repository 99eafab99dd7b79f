"""Expert parallelism: ranks that hold whole experts, and experts that move between ranks."""

from .divided import ExpertRanks as ExpertRanks
