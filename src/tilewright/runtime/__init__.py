"""What every kernel shares: dispatch and launch, NVRTC, cuBLASLt, Philox, caches on disk, and headers in `cuda/`."""
