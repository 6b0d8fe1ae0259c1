"""One training run over many ranks, on torch.distributed: DDP, FSDP2, tensor, context, pipeline, expert parallel."""
