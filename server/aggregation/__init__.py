"""From offers to stored answers: the core, the stages of a run, what an operator sees of its progress."""
