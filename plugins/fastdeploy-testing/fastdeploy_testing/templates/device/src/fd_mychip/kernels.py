"""Operations that this device implements itself: name in contracts/ops.py -> "module:function".

What is missing comes from the reference. Kernels live in modules of their own, which are imported
only when this device is used.
"""

TABLE: dict[str, str] = {}
