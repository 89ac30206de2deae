"""Turns stored answers into labels, the student, its controls and the bundle. Costs no privacy and can be repeated."""
