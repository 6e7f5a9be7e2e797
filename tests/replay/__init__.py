"""A scripted device and its control plane, for tests of the front end without a model."""

from tests.replay.control import ReplayControl
from tests.replay.device import Channel, ReplayDevice
from tests.replay.script import Playing, Script, Submission

__all__ = ["Channel", "Playing", "ReplayControl", "ReplayDevice", "Script", "Submission"]
