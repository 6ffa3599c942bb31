"""Forecasts a run before anyone rents machines for it: utilisation, waiting, bytes, memory, and settings that suit a link."""
