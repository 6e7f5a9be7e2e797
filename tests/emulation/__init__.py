"""Device code on emulated threads, for machines without a device."""
