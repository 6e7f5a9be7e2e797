"""Ways to reach the arena: ordered writes into the inbound region, reads from the outbound region."""
