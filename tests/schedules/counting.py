"""What a schedule does, counted from its actions."""

from remat.schedules import Backward, Schedule, Tape


def recordings(schedule: Schedule) -> int:
    """Count the rows of tapes, each with the step after it that is gone back through at once."""
    count, taped, end = 0, set[int](), None  # where a row may go on
    for action in schedule:
        if isinstance(action, Tape):
            count += action.step != end
            taped.add(action.step)
            end = action.step + 1
        else:
            if isinstance(action, Backward) and action.step not in taped:
                count += action.step != end
            end = None
    return count
