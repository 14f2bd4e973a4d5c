"""Passes under a memory budget: recorded, planned, and then followed op by op."""
