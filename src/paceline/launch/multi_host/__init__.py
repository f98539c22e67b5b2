"""Jobs on several hosts: torchrun's launcher runs on each host, and all hosts report the same first failure."""

from paceline.launch.multi_host.launcher import launch_hosts
from paceline.launch.multi_host.meeting_point import check_meeting_point

__all__ = ["check_meeting_point", "launch_hosts"]
