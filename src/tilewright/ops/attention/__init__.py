"""Attention: cuDNN forward, backward in CUDA C++ on a Hopper."""
