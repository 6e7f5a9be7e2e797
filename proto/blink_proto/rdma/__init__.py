"""What both ends of an RDMA connection share: the messages that introduce them, and the binding to verbs."""
