"""Judges the device by its telemetry page alone: no call to the runtime's host is involved."""

from __future__ import annotations

from enum import Enum

from blink_proto.arena import DeviceState


class DeviceHealth(Enum):
    """What the front end may expect of the device."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    SILENT = "silent"
    STOPPED = "stopped"
    FAILED = "failed"

    @property
    def is_lost(self) -> bool:
        """No token will come."""
        return self in (DeviceHealth.SILENT, DeviceHealth.STOPPED, DeviceHealth.FAILED)


_BY_STATE: dict[int, DeviceHealth] = {
    DeviceState.STARTING: DeviceHealth.STARTING,
    DeviceState.RUNNING: DeviceHealth.READY,
    DeviceState.DRAINING: DeviceHealth.DRAINING,
    DeviceState.STOPPED: DeviceHealth.STOPPED,
    DeviceState.FAILED: DeviceHealth.FAILED,
}


class HeartbeatWatch:
    """Follows the heartbeat. A busy device beats too, so silence means that it is gone.

    Args:
        timeout: seconds without a beat after which the device counts as lost.
        now: seconds, from the caller's monotonic clock.
    """

    def __init__(self, timeout: float, now: float) -> None:
        self._timeout = timeout
        self._beat = -1
        self._changed = now
        self.seconds_silent = 0.0

    def judge(self, telemetry: dict[str, int], now: float) -> DeviceHealth:
        """The device's health by a telemetry page read at `now`."""
        if telemetry["heartbeat"] != self._beat:
            self._beat, self._changed = telemetry["heartbeat"], now
        self.seconds_silent = now - self._changed
        health = _BY_STATE.get(telemetry["state"], DeviceHealth.FAILED)
        if not health.is_lost and self.seconds_silent >= self._timeout:
            return DeviceHealth.SILENT
        return health
