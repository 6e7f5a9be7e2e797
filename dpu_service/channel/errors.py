"""What can go wrong between the front end and the device."""

from __future__ import annotations


class ChannelError(Exception):
    """The arena is not what the session said, or the device wrote something impossible."""


class LeaseLostError(Exception):
    """The device ended this worker's lease: all sequences of the channel are gone."""
