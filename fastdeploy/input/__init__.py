"""FastDeploy 2.x's path of tokenizers."""
