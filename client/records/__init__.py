"""Keeps a site's files about its teachers and about the patients they were trained on."""
