"""The parts of a decoder layer: exact PyTorch on any device, Triton kernels beside it on CUDA."""
