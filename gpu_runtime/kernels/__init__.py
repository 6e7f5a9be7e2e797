"""Kernels of the step: one Python file beside one C++ source each, with a plain-torch reference."""
