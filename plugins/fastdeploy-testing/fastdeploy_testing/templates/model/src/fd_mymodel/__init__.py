"""Model family `MyModelForCausalLM` for FastDeploy."""
