"""The chain: the endless series of steps, and the process that runs it."""
