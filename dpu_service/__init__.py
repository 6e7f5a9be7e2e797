"""The front end: from HTTP requests to sequences on the GPU and back, on the cores of a DPU."""
