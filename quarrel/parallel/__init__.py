"""One model on several devices: a process a device, that hold a share each and run every step together."""

from quarrel.parallel.team import Team, Work

__all__ = ["Team", "Work"]
