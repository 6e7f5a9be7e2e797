// Every other channel's front end reaches device memory by itself.
#define BLINK_DIRECT 0x5555555555555555
#include "relay.cpp"
