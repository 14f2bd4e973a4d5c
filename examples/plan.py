"""Schedules without an engine: for authors of other libraries."""

from remat.schedules import Disk, Revolve, plan_loop, simulate

schedule = Revolve(steps=10, slots=3)
for action in schedule:
    print(action)
print(simulate(schedule, steps=10, memory=3))

plan = plan_loop(1000, memory_bytes="64MB", state_bytes="1MB", tape_bytes="3MB")
print(plan.name, plan.evaluations, plan.reason)

plan = plan_loop(1000, slots=10, disk=Disk(slots=100, write_cost=3, read_cost=3))
print(plan.name, plan.evaluations, plan.reason)
