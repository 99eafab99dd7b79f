"""FastDeploy on Enflame S60 (GCU)."""
