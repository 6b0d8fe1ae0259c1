"""The feed-forward block of SwiGLU and GEGLU transformers, its activation inside of the matmuls around it."""
