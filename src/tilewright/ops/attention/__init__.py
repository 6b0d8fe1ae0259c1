"""Attention by several backends: Triton kernels, CUDA C++ on a Hopper, PyTorch's."""
