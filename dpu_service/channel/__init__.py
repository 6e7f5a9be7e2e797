"""The protocol of one channel of the arena, over any transport: leases, submissions, cancels, the token log."""
