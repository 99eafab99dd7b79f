"""The paged KV cache as the host sees it: blocks, prefix cache, host tier, sizes."""

from .blocks import BlockPool
from .groups import BoundedGroup, GroupPlan, bounded_rules
from .host_tier import HostTier
from .manager import NO_MATCH, ForkSource, KVCacheManager, PrefixMatch
from .prefix import BlockTable, CacheEntry, PrefixCache
from .sizing import CachePlan, MemoryProfile, plan_cache, pool_bytes

__all__ = [
    "NO_MATCH",
    "BlockPool",
    "BlockTable",
    "BoundedGroup",
    "CacheEntry",
    "CachePlan",
    "ForkSource",
    "GroupPlan",
    "HostTier",
    "KVCacheManager",
    "MemoryProfile",
    "PrefixCache",
    "PrefixMatch",
    "bounded_rules",
    "plan_cache",
    "pool_bytes",
]
