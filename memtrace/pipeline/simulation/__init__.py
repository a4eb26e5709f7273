"""Simulation of pipeline schedules: times, all-reduces and memory."""
