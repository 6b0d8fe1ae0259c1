"""One training run over many ranks, on torch.distributed: meshes, DDP, FSDP2, tensor, context and pipeline parallel."""
