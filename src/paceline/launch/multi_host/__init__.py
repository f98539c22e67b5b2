"""Several hosts: torchrun's own launcher on each, which tell each other which rank failed first."""

from paceline.launch.multi_host.launcher import launch_hosts
from paceline.launch.multi_host.meeting_point import check_meeting_point

__all__ = ["check_meeting_point", "launch_hosts"]
