"""Why a request gets no sequence, or loses one."""

from __future__ import annotations


class SequencesError(Exception):
    """Base of all of them; the message is fit for clients."""


class QueueFullError(SequencesError):
    """Too many sequences wait for their first token already."""


class DeviceUnavailableError(SequencesError):
    """There is no device that takes submissions now."""


class SequenceLostError(SequencesError):
    """The device ended the sequence with an error, or is gone."""


class ClientGoneError(SequencesError):
    """Nobody waits for the answer any more."""


class DeadlinePassedError(SequencesError):
    """The time that the client gave is over."""


class DrainTimeoutError(SequencesError):
    """The service stops and the grace time is over."""
