"""Turns stored answers into labels, the student, its controls and the bundle; costs no privacy and can be repeated."""
