"""Fine-tunes the student on the hospital's own cases.

By default the result has no guarantee and must not leave the hospital; a privately trained one may leave.
"""
