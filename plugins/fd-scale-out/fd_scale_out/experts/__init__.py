"""Expert parallelism: ranks that hold whole experts, of one engine or of several, and experts that
move between ranks."""

from .divided import ExpertRanks as ExpertRanks
from .divided import expert_ranks as expert_ranks
