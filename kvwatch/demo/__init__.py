"""An embedded node that runs with no GPU and no vLLM."""
