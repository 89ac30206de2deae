"""Holds a site's records of its teachers and of the patients they were trained on."""
