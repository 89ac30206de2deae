"""Fine-tunes the student on the hospital's own cases, into a network that never leaves the hospital."""
