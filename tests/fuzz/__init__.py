"""Frames that are none, and frames that an attacker makes of real ones, against all that takes frames."""
