"""FastDeploy on MetaX C550."""
