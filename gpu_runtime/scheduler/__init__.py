"""The scheduler: portable C++ and its host interface."""
