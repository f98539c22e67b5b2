"""Several hosts: torchrun's own launcher on each, which tell each other which rank failed first.

Rooms, each above those that it imports:

    launcher
    host_agent
    cause
"""

from paceline.launch.multi_host.launcher import launch_hosts

__all__ = ["launch_hosts"]
