"""Device `x86`: FastDeploy on x86-64 processors through native kernels (see _native and
kernels.py)."""
