"""SwiGLU, GEGLU and bias + GELU."""
