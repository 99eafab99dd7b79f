"""FastDeploy 2.x paths of the records that programs build and read."""
