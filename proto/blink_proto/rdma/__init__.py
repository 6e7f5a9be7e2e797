"""What both ends of an RDMA connection share: the messages that introduce them to each other, and the binding to verbs."""
