"""The arena across RDMA: one-sided writes and reads on a reliable queue pair, without the other host's help."""
