// A scheduler of one sequence in a steady state, for rehearsals: a step of it does nothing that anybody sees. The tail
// of a step graph finds its instructions in no cache, after weights have gone through all of them, and waits for
// them line by line. A rehearsal while the step still samples has them fetched; the real step then finds
// them.
#pragma once
#include "scheduler/host.h"
#include "scheduler/image.h"

extern "C" {

// Device memory of a rehearsal, all of which its image fills.
uint64_t blink_rehearsal_bytes();

// Fills `image` (64-byte aligned) for device memory at `base`; `cold` is the blink::ColdArrays to load the state from.
// Its state is never stored back, so that every rehearsal is the same.
void blink_rehearsal_make(uint64_t base, uint8_t* image, uint8_t cold[48]);

}  // extern "C"
