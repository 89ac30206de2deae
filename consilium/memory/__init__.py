"""A study in memory: ask teachers, release noisy sums, decode labels, train a student; no daemon, file or ledger."""
