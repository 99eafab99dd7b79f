"""FastDeploy on Kunlunxin P800 (XPU)."""
