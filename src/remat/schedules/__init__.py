"""Pure planning for loops: n steps in, a lazily generated list of actions out.

One paper a file. A `Schedule` can be iterated as often as you like and says how many evaluations
it takes; `simulate` runs any of them on integers.
"""

from .actions import (
    Action,
    Advance,
    Backward,
    Drop,
    Restore,
    Save,
    Schedule,
    Sizes,
    Tape,
    Tier,
)
from .blocks import Blocks
from .choose import Disk, LoopPlan, ScheduleOption, plan_loop
from .given import Given
from .mixed import Mixed
from .multistage import Multistage
from .online import Online, OnlineRun
from .revolve import Revolve
from .savings import (
    compute_checkpoint_positions,
    estimate_checkpoint_savings,
    get_memory_savings,
    should_checkpoint,
)
from .simulate import IllegalMoveError, ScheduleCost, simulate
from .staged import Staged
from .store_all import StoreAll
from .uniform import Uniform

__all__ = [
    "Action",
    "Advance",
    "Backward",
    "Blocks",
    "Disk",
    "Drop",
    "Given",
    "IllegalMoveError",
    "LoopPlan",
    "Mixed",
    "Multistage",
    "Online",
    "OnlineRun",
    "Restore",
    "Revolve",
    "Save",
    "Schedule",
    "ScheduleCost",
    "ScheduleOption",
    "Sizes",
    "Staged",
    "StoreAll",
    "Tape",
    "Tier",
    "Uniform",
    "compute_checkpoint_positions",
    "estimate_checkpoint_savings",
    "get_memory_savings",
    "plan_loop",
    "should_checkpoint",
    "simulate",
]
