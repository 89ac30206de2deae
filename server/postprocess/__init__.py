"""Makes labels, the student, its controls and the bundle from stored answers; this costs no privacy budget."""
