"""Kernels of the step on the GPU. Imported only where one is used: what they need is not installed elsewhere."""
