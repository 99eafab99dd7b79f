"""FastDeploy on Iluvatar BI-V150."""
