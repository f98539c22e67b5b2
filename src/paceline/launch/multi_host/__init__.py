"""Jobs on several hosts: torchrun's launcher on each, with a common report of the first failure."""

from paceline.launch.multi_host.launcher import launch_hosts
from paceline.launch.multi_host.meeting_point import check_meeting_point

__all__ = ["check_meeting_point", "launch_hosts"]
