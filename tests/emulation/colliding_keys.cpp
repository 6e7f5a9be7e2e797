// The host's scheduler with a prefix cache whose keys have two bits, so that nearly all of them collide.
#define BLINK_PREFIX_KEY_MASK 3ull
#include "scheduler/host.cpp"
