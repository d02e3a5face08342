"""Schedules: how a kernel is laid on a machine, with choices as plain data."""
