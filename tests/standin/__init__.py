"""A CUDA device beside an RDMA adapter, without either: files of memory stand in for what both reach."""
