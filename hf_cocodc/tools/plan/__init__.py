"""Forecasts a run before anyone rents machines for it: utilization, waiting, bytes, memory, and settings that suit a link."""
