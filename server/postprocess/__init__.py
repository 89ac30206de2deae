"""What stored answers become: labels, the student, its controls, the bundle. Free of privacy cost, repeatable."""
