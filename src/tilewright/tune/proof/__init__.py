"""Whether a run trains the same model: outputs, gradients and losses beside the standard float32 model."""
