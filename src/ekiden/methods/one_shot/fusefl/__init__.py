"""FuseFL: its fused blocks and calibration."""
