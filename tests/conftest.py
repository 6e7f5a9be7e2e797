"""For all tests: without a CUDA device, Triton's kernels run in its interpreter."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported, by whichever package imports it first
