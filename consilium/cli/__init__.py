"""Every command, one file a group."""
