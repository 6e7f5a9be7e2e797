"""What front ends are given of the arena's memory, by transport, and how it is taken away again."""
