"""Errors, checks of values, files, seeds: what every room needs. Imports nothing of Ekiden's other
rooms.
"""
