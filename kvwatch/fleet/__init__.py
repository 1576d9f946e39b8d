"""Questions about many nodes, asked of Prometheus."""
