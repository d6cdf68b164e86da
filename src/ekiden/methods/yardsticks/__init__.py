"""Yardsticks: each client alone, all data in one place."""
