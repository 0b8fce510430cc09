from .session import Supervisor as Supervisor
from .signals import PREEMPTED as PREEMPTED
