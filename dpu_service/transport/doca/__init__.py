"""The arena by DOCA RDMA: writes and reads by tasks on one connection, completed through a progress engine."""
