"""Operations that this device implements itself: name in contracts/ops/ -> "module:function".

The reference provides the others. Kernels live in modules of their own, which are imported only
when this device is used.
"""

TABLE: dict[str, str] = {}
