"""Driver `mystates` of layers that keep a state, for FastDeploy."""
