"""The KV layers of each family of architectures."""
